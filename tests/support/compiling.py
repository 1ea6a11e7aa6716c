"""Runs Python in a process whose Triton compiles; in the tests' own process it interprets kernels if there is no GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType


def run_compiling(
    *words: str, timeout_seconds: float = 240, variables: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments, and with ``variables`` added to the environment."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**own, **variables},
    )
