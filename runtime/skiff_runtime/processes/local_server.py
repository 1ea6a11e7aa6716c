"""A ``skiff serve`` as a child of this process, for a chat or a benchmark without a ``--url``."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from skiff_runtime.contract import COMMAND_SERVE, FLAG_HOST, FLAG_PORT
from skiff_runtime.errors import StartupError

READY_SECONDS: Final = 300.0
STOP_SECONDS: Final = 20.0
TAIL_LINES: Final = 8
_POLL_SECONDS: Final = 0.1
_READY: Final = re.compile(r" service_ready url=(\S+)")
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


class LocalServer:
    """Serves on a free loopback port within a ``with`` block. The server does not outlive this process."""

    def __init__(self, arguments: Sequence[str], *, on_wait: Callable[[], None] | None = None) -> None:
        """``arguments``: those of ``skiff serve``; ``on_wait`` is called about ten times a second until it is ready."""
        self._command = [sys.executable, "-m", "skiff_runtime", COMMAND_SERVE, *arguments]
        self._command += [FLAG_HOST, "127.0.0.1", FLAG_PORT, "0"]
        self._on_wait = on_wait
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close(), once the child has exited
        self.url = ""

    def __enter__(self) -> Self:
        # A session of its own: Ctrl-C in the terminal is for the caller, not for the server.
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            self.url = self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The supervisor's process id. The other processes of the service are its children."""
        return self._child.pid

    def log_text(self) -> str:
        """Return everything that the server has logged."""
        # pread: the child shares the file's offset and writes at it.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def close(self) -> None:
        """Stop the server and wait until it has exited."""
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            found = _READY.search(self.log_text())
            if found:
                return found.group(1)
            if self._child.poll() is not None:
                raise StartupError(
                    f"the server exited before it was ready; the end of its log:\n{self._read_log_tail()}"
                )
            if self._on_wait is not None:
                self._on_wait()
            time.sleep(_POLL_SECONDS)
        raise StartupError(f"the server was not ready within {READY_SECONDS:g} s:\n{self._read_log_tail()}")

    def _read_log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-TAIL_LINES:])


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
