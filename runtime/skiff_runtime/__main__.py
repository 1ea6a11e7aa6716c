"""The ``skiff`` command: serve, chat, info, fetch, prebuild, tune, bench and complete."""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from skiff_runtime import log
from skiff_runtime.config.arguments import Parser, add_config_arguments, build_config
from skiff_runtime.contract import COMMAND_FETCH, COMMAND_SERVE, EXIT_FETCH_FAILED, EXIT_OK, EXIT_USAGE
from skiff_runtime.errors import ConfigError, FetchError, SkiffError
from skiff_runtime.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

Command = Callable[[argparse.Namespace], int]

_PLUGIN_GROUP: Final = "skiff.commands"
"""The entry points of commands of other packages: a function of (argv, prog) for each name."""

_RENAMED_BENCHMARKS: Final = {"gaps": "prefill-interference"}
_BENCHMARKS: Final = {
    "serve": ("online.serve", "open-loop load against a running server"),
    "compare": ("online.compare", "two results of bench serve side by side"),
    "offline": ("offline.throughput", "throughput of the engine, without HTTP"),
    "prefill-interference": (
        "offline.prefill_interference",
        "inter-token latency of running requests while a long prompt is prefilled",
    ),
    "structured": ("offline.structured", "grammar masks, filled row by row and in batches"),
    "overhead": ("online.overhead", "CPU time of each server process for a request and for a token"),
    "router": (
        "router.command",
        "cost of the router beside others, and what clients see of faults behind it",
    ),
    "routing": ("routing", "the router's policies in a simulated cluster, beside others"),
    "path": ("path", "cost of the serving path, with a stub in the engine's place"),
}

_SERVE_HELP = """\
Serve a model over HTTP with an OpenAI-compatible API.

Each option can also be given in the environment, under the name in brackets; the
command line wins.

examples:
  skiff serve                                     the small demo model that comes with Skiff
  skiff serve --model hf://Qwen/Qwen3-0.6B        download once, then serve
  skiff serve --model /models/llama --tp 2        a local directory, over two ranks
"""

SHELLS: Final = ("bash", "zsh", "fish")
_COMPLETE_HELP: Final = """\
Print the script with which a shell completes commands, flags and their values.

to install it:
  skiff complete bash > ~/.local/share/bash-completion/completions/skiff
  skiff complete zsh > ~/.zfunc/_skiff        with fpath+=(~/.zfunc) before compinit in .zshrc
  skiff complete fish > ~/.config/fish/completions/skiff.fish
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command of ``argv`` and return its exit code. Errors become one line on stderr."""
    words = sys.argv[1:] if argv is None else argv
    try:
        parser = _make_parser(words)
        if words and not words[0].startswith("-") and words[0] not in _commands(parser):
            for plugin in _plugins().select(name=words[0]):
                return _run_plugin(plugin, words)
        arguments = parser.parse_args(words)
        command: Command = arguments.command
        return command(arguments)
    except FetchError as error:
        return _print_error(error, EXIT_FETCH_FAILED)
    except SkiffError as error:
        return _print_error(error, EXIT_USAGE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _commands(parser: Parser) -> set[str]:
    """Return the names of the commands of this module."""
    subparsers = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return {name for each in subparsers for name in each.choices}


def _plugins() -> "EntryPoints":
    """Return the commands of other packages. Importing the library takes 30 ms, so `serve` does without it."""
    from importlib.metadata import entry_points

    return entry_points(group=_PLUGIN_GROUP)


def _run_plugin(plugin: "EntryPoint", words: list[str]) -> int:
    """Run a command of another package with the whole command line; it prints its own errors."""
    try:
        command: Callable[[list[str], str], int] = plugin.load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{plugin.name}: {error.name} is not installed; pip install 'skiff[operator]'"
        ) from error
    return command(words, "skiff")


def _print_error(error: SkiffError, code: int) -> int:
    print(f"skiff: {error}", file=sys.stderr)
    return code


def _make_parser(words: list[str] | None) -> Parser:
    """Return the parser for a command line; None: with the flags of every command, which imports all their modules."""
    first, second = (None, None) if words is None else (words[:1], words[1:2])
    parser = Parser(prog="skiff", description="Serve large language models, and chat with them.")
    if first in (["-h"], ["--help"]) and (names := sorted(_plugins().names)):
        parser.epilog = f"commands for Kubernetes, with the operator extra: {', '.join(names)}"
    parser.add_argument("--version", action="version", version=f"skiff {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        COMMAND_SERVE,
        help="serve a model over HTTP",
        description=_SERVE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(serve)
    serve.set_defaults(command=_serve)
    _add_lazy_command(
        commands, first, "chat", "chat with a served model in the terminal", "skiff_runtime.shell"
    )
    _add_lazy_command(
        commands, first, "info", "describe a model, and check whether it fits a GPU", "skiff_runtime.info"
    )
    _add_lazy_command(commands, first, COMMAND_FETCH, "download an hf:// model", "skiff_runtime.fetch")
    _add_lazy_command(
        commands, first, "router", "serve all models under one URL, before their pods", "skiff_router.command"
    )
    _add_lazy_command(
        commands,
        first,
        "prebuild",
        "compile GPU kernels ahead of time, without a GPU",
        "skiff_runtime.prebuild.command",
    )
    _add_lazy_command(
        commands, first, "tune", "measure tuned kernel numbers on this GPU", "skiff_runtime.tune.command"
    )
    complete = commands.add_parser(
        "complete",
        help="print the completion script of a shell",
        description=_COMPLETE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    complete.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    complete.set_defaults(command=_complete)
    if words and words[0] == "bench" and words[1:2] and (new := _RENAMED_BENCHMARKS.get(words[1])):
        raise ConfigError(f"bench {words[1]} is now bench {new}; see skiff bench --help")
    bench = commands.add_parser("bench", help="measure a server, or the engine alone")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for name, (module, text) in _BENCHMARKS.items():
        _add_lazy_command(kinds, second, name, text, f"skiff_runtime.bench.{module}")
    return parser


def _add_lazy_command(
    commands: "argparse._SubParsersAction[Parser]", words: list[str] | None, name: str, text: str, module: str
) -> None:
    """Add a command whose module is imported only if ``words`` says that it is to run, or is None."""
    parser = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if words is None or words == [name]:
        loaded = importlib.import_module(module)
        parser.description = loaded.__doc__
        loaded.add_arguments(parser)
        parser.set_defaults(command=loaded.run)


def _complete(arguments: argparse.Namespace) -> int:
    from skiff_runtime.completion import write_completion

    print(write_completion(_make_parser(None), arguments.shell))
    return EXIT_OK


def _serve(arguments: argparse.Namespace) -> int:
    from skiff_runtime.processes.resolve import resolve
    from skiff_runtime.processes.supervisor import serve

    config = build_config(arguments)
    log.configure("supervisor", config.log_level)
    # PID 1 has no default action for SIGTERM, and a download may take minutes before the supervisor takes over.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resolved, model = resolve(config)
    return serve(resolved, model)


if __name__ == "__main__":
    sys.exit(main())
