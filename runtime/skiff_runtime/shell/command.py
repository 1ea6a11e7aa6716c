"""``skiff chat``: its flags, and the choice of a server."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from skiff_runtime.config.api_keys import check_api_keys
from skiff_runtime.contract import API_PORT, EXIT_FAILURE
from skiff_runtime.errors import StartupError
from skiff_runtime.processes.local_server import LocalServer
from skiff_runtime.shell.chat_client import ChatClient, ChatError, ServerUnreachable
from skiff_runtime.shell.conversation import HELP, Conversation
from skiff_runtime.shell.sampling_parameters import PARAMETERS, parse_parameter
from skiff_runtime.shell.terminal import PipedChat, Terminal

DEFAULT_URL: Final = f"http://127.0.0.1:{API_PORT}"
DEMO: Final = "demo://"
DESCRIPTION: Final = "Talk to a served model in the terminal."
EPILOG: Final = f"""\
Without --url, `skiff chat` talks to {DEFAULT_URL}; where nothing listens there, it serves
the demo model itself for as long as the chat lasts, as it does any model that --model locates. When standard input is not a
terminal, each of its lines is a question.

in the chat:
  {HELP.replace(chr(10), chr(10) + "  ")}

examples:
  skiff chat
  skiff chat --url http://127.0.0.1:9000 --system "Answer in one sentence." --temperature 0
  skiff chat --model hf://Qwen/Qwen3-0.6B
  echo "What is Skiff?" | skiff chat
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff chat``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=None, help=f"address of the server (default: {DEFAULT_URL})")
    server.add_argument(
        "--model",
        default=None,
        metavar="NAME",
        help="served name (default: the first one); a directory, hf://org/name or demo:// is served for this chat",
    )
    server.add_argument(
        "--api-key",
        default=os.environ.get("SKIFF_API_KEY", "").partition(",")[0] or None,
        metavar="KEY",
        help="where the server wants one (default: the first of $SKIFF_API_KEY)",
    )
    answer = parser.add_argument_group("answers", "Left out, the server's defaults hold.")
    answer.add_argument("--system", default=None, metavar="TEXT", help="how the model shall behave")
    for name, parameter in PARAMETERS.items():
        answer.add_argument(
            "--" + name.replace("_", "-"),
            type=_parser(name),
            default=None,
            metavar=parameter.kind.__name__.upper(),
            help=parameter.text,
        )


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user leaves; the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            client = _connect(arguments, stack)
        except (ChatError, StartupError) as error:
            print(f"skiff chat: {error}", file=sys.stderr)
            return EXIT_FAILURE
        stack.callback(client.close)
        conversation = Conversation(client, arguments.system, **_parameters(arguments))
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(f"Talking to {client.model} at {client.url}.")
            return Terminal(conversation, client.model).run()
        return PipedChat(conversation).run()


def _connect(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> ChatClient:
    """The server that was asked for; a model of our own until ``stack`` unwinds; else the usual server, or the demo."""
    key, model = arguments.api_key, arguments.model
    if key is not None:
        check_api_keys((key,), "--api-key")
    if arguments.url is not None or not _is_own(model):
        try:
            return ChatClient(arguments.url or DEFAULT_URL, model=model, key=key)
        except ServerUnreachable:
            if arguments.url is not None or model is not None:
                raise
    console = Console(stderr=True)
    if model is None:
        console.print(
            f"Nothing listens at {DEFAULT_URL}: serving the demo model for this chat.", highlight=False
        )
    with console.status("starting"):
        server = stack.enter_context(LocalServer(["--model", model or DEMO]))
    return ChatClient(server.url, key=key)


def _is_own(model: str | None) -> bool:
    """Whether ``--model`` says where a model is, and not how a server calls it."""
    return model is not None and ("://" in model or Path(model).is_dir())


def _parser(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_parameter(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in PARAMETERS}
    return {name: value for name, value in given.items() if value is not None}
