"""Runs Python in a process whose Triton compiles; in the tests' own process it interprets kernels if there is no GPU."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def run_compiling(
    *words: str, timeout_seconds: float = 240, variables: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments, and with ``variables`` added to the environment."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**_environment(), **variables},
    )


class CompilingProcess:
    """A process that answers each line of JSON with a line of JSON; what it prints on stderr shows when it fails.

    To import torch and Triton takes longer than most of what is compiled.
    """

    def __init__(self, *words: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )

    def ask(self, question: Any) -> Any:
        """Return the answer; raises ``RuntimeError`` if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(self._errors.read())
        return json.loads(answer)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
