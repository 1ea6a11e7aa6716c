"""The entry point of the commands: `kubectl-skiff`, which kubectl runs as `kubectl skiff`, and the runtime's `skiff`.

Only the module of the given command is imported. Exit codes are kubectl's: 0, and 1 for any error.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, cast

from skiff_operator.errors import OperatorError

COMMANDS: Final = {
    "explain": ("skiff_operator.cli.explain", "say why an InferenceService is not Ready, and what to do"),
    "top": ("skiff_operator.cli.top", "show the load of InferenceServices, live"),
    "plan": ("skiff_operator.cli.plan", "show what a manifest would change, restart and need"),
    "rollout": ("skiff_operator.cli.rollout", "manage the rollouts of an InferenceService"),
}
"""Module and summary of each command. The entry points in pyproject.toml have the same names."""

_ERROR_CODES: Final = {"plan": 2}
"""The exit code of an error where 1 has another meaning: `plan` has those of `kubectl diff`."""

_DESCRIPTION: Final = "Manage the InferenceServices of a Kubernetes cluster."


class UsageError(OperatorError):
    """The command line is invalid."""

    reason = "UsageError"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of exiting, and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options, "allow_abbrev": False}
        )

    def error(self, message: str) -> NoReturn:
        """Report an invalid command line."""
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None, prog: str = "kubectl skiff") -> int:
    """Run the command of `argv`, of a program with the name `prog`, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = make_parser(words[:1], prog).parse_args(words)
        command = cast(Callable[[argparse.Namespace], int], arguments.command)
        return command(arguments)
    except ModuleNotFoundError as error:
        print(f"{prog}: {error.name} is not installed; pip install 'skiff[operator]'", file=sys.stderr)
    except OperatorError as error:
        print(f"{prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has exited; the buffered output is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _ERROR_CODES.get(words[0], 1) if words else 1


def make_parser(words: Sequence[str], prog: str) -> Parser:
    """Return the parser, with the arguments of the command that `words` begin with."""
    parser = Parser(prog=prog, description=_DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if words[:1] == [name]:
            loaded = importlib.import_module(module)
            command.description = loaded.__doc__
            loaded.add_arguments(command)
            command.set_defaults(command=loaded.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
