"""The command ``skiff chat``: its flags, and the connection to a server."""

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
from skiff_runtime.shell.terminal import PipedChat, TerminalChat, report_progress

DEFAULT_URL: Final = f"http://127.0.0.1:{API_PORT}"
DEMO: Final = "demo://"
DESCRIPTION: Final = "Chat with a served model in the terminal."
EPILOG: Final = f"""\
Without --url, `skiff chat` connects to {DEFAULT_URL}. If no server listens there, it serves
the demo model itself until the chat ends. It also serves any model that --model locates. If standard input is not
a terminal, each of its lines is a question.

commands in the chat:
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
        help="name of a served model (default: the first); a directory, hf://org/name or demo:// is served for this chat",
    )
    server.add_argument(
        "--api-key",
        default=os.environ.get("SKIFF_API_KEY", "").partition(",")[0] or None,
        metavar="KEY",
        help="API key for the server (default: the first of $SKIFF_API_KEY)",
    )
    answer = parser.add_argument_group(
        "answers", "The server's defaults apply to parameters that are not given."
    )
    answer.add_argument("--system", default=None, metavar="TEXT", help="system message")
    for name, parameter in PARAMETERS.items():
        answer.add_argument(
            "--" + name.replace("_", "-"),
            type=_make_type(name),
            default=None,
            metavar=parameter.kind.__name__.upper(),
            help=parameter.text,
        )


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user quits, and return the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            client = _connect(arguments, stack)
        except (ChatError, StartupError) as error:
            print(f"skiff chat: {error}", file=sys.stderr)
            return EXIT_FAILURE
        stack.callback(client.close)
        conversation = Conversation(client, arguments.system, **_parameters(arguments))
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(f"Connected to {client.model} at {client.url}.")
            terminal = TerminalChat(conversation, client.model)
            client.on_progress = terminal.show_progress
            return terminal.run()
        client.on_progress = report_progress
        return PipedChat(conversation).run()


def _connect(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> ChatClient:
    """Connect to the server of ``--url``, or to one that serves ``--model`` until ``stack`` unwinds.

    Without both, connect to the default address, or serve the demo model if no server listens there.
    """
    key, model = arguments.api_key, arguments.model
    if key is not None:
        check_api_keys((key,), "--api-key")
    if arguments.url is not None or not _is_location(model):
        try:
            return ChatClient(arguments.url or DEFAULT_URL, model=model, key=key)
        except ServerUnreachable:
            if arguments.url is not None or model is not None:
                raise
    console = Console(stderr=True)
    if model is None:
        console.print(
            f"No server listens at {DEFAULT_URL}: serving the demo model for this chat.", highlight=False
        )
    with console.status("starting"):
        server = stack.enter_context(LocalServer(["--model", model or DEMO]))
    return ChatClient(server.url, key=key)


def _is_location(model: str | None) -> bool:
    """Return whether ``--model`` is the location of a model, rather than its name on a server."""
    return model is not None and ("://" in model or Path(model).is_dir())


def _make_type(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_parameter(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in PARAMETERS}
    return {name: value for name, value in given.items() if value is not None}
