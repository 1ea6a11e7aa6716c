"""The command ``skiff-router``: ``skiff router`` for the image without the runtime."""

import argparse
import signal
import sys

from skiff_router.command import add_arguments, run
from skiff_runtime.contract import EXIT_USAGE
from skiff_runtime.errors import SkiffError
from skiff_runtime.version import __version__


def main(argv: list[str] | None = None) -> int:
    """Run a router and return its exit code. Errors become one line on stderr."""
    parser = argparse.ArgumentParser(prog="skiff-router")
    parser.add_argument("--version", action="version", version=f"skiff-router {__version__}")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except SkiffError as error:
        print(f"skiff-router: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
