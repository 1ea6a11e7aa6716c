"""``skiff chat``: its flags, and the choice of a server."""

import argparse
import contextlib
import sys
from typing import Any, Final

from rich.console import Console

from skiff_runtime.contract import API_PORT, EXIT_FAILURE
from skiff_runtime.errors import StartupError
from skiff_runtime.local_server import LocalServer
from skiff_runtime.shell.client import ChatClient, ChatError, Unreachable
from skiff_runtime.shell.conversation import HELP, Conversation
from skiff_runtime.shell.terminal import Pipe, Terminal

DEFAULT_URL: Final = f"http://127.0.0.1:{API_PORT}"
DEMO: Final = "demo://"
DESCRIPTION: Final = "Talk to a served model in the terminal."
EPILOG: Final = f"""\
Without --url, `skiff chat` talks to {DEFAULT_URL}; where nothing listens there, it serves
the demo model itself for as long as the chat lasts. When standard input is not a
terminal, each of its lines is a question.

in the chat:
  {HELP.replace(chr(10), chr(10) + "  ")}

examples:
  skiff chat
  skiff chat --url http://127.0.0.1:9000 --system "Answer in one sentence." --temperature 0
  echo "What is Skiff?" | skiff chat
"""
_SAMPLING: Final[tuple[tuple[str, type, str], ...]] = (
    ("temperature", float, "0 always takes the likeliest token"),
    ("top_p", float, "draw from the likeliest tokens that together have this probability"),
    ("max_tokens", int, "longest answer, in tokens"),
    ("seed", int, "makes answers repeatable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff chat``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=None, help=f"address of the server (default: {DEFAULT_URL})")
    server.add_argument("--model", default=None, metavar="NAME", help="served name (default: the first one)")
    answer = parser.add_argument_group("answers", "Left out, the server's defaults hold.")
    answer.add_argument("--system", default=None, metavar="TEXT", help="how the model shall behave")
    for name, kind, text in _SAMPLING:
        answer.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=None, metavar=kind.__name__.upper(), help=text
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
        conversation = Conversation(client, arguments.system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(f"Talking to {client.model} at {client.url}.")
            return Terminal(conversation, client.model).run()
        return Pipe(conversation).run()


def _connect(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> ChatClient:
    """The server that was asked for; else the usual one; else one of our own until ``stack`` unwinds."""
    parameters = _parameters(arguments)
    try:
        return ChatClient(arguments.url or DEFAULT_URL, model=arguments.model, parameters=parameters)
    except Unreachable:
        if arguments.url is not None:
            raise
    console = Console(stderr=True)
    console.print(f"Nothing listens at {DEFAULT_URL}: serving the demo model for this chat.", highlight=False)
    with console.status("starting"):
        server = stack.enter_context(LocalServer(["--model", DEMO]))
    return ChatClient(server.url, model=arguments.model, parameters=parameters)


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name, _, _ in _SAMPLING}
    return {name: value for name, value in given.items() if value is not None}
