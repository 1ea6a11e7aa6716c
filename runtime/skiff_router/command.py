"""The command ``skiff router``."""

import argparse

from skiff_router.config import add_arguments, from_arguments
from skiff_runtime.contract import EXIT_OK

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run a router until it is stopped."""
    from skiff_router import server

    server.run(from_arguments(arguments))
    return EXIT_OK
