"""Entry point of every child process: ``python -m skiff_runtime.processes.child_process ROLE INDEX RUN_DIR PARENT_PID``.

A child dies with its parent, ignores SIGINT (which the supervisor handles), stops on SIGTERM, and reports
its start phases and heartbeats to the supervisor.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.contract import EXIT_FAILURE, EXIT_OK, PHASES
from skiff_runtime.errors import SkiffError, StartupError
from skiff_runtime.messages import Heartbeat, PhaseReport, ProcessFailed, Ready, Serving
from skiff_runtime.messages.transport import Endpoints, Sender, TransportError, close_sockets
from skiff_runtime.processes.launch import Launch, Role

HEARTBEAT_INTERVAL_SECONDS: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_TORCH_OUT_OF_MEMORY: Final = "OutOfMemoryError"
"""Known by name, because most processes do not import torch."""
_MAINS: Final[dict[Role, tuple[str, str]]] = {
    Role.API: ("skiff_runtime.api.server", "run"),
    Role.TOKENIZER: ("skiff_runtime.tokenizer.tokenizer_worker", "run"),
    Role.DETOKENIZER: ("skiff_runtime.tokenizer.detokenizer", "run"),
    Role.RANK: ("skiff_runtime.worker.rank_start", "run"),
}


class Child:
    """A child process for its own main function: its launch file, and its reports to the supervisor."""

    def __init__(self, role: Role, index: int, launch: Launch) -> None:
        self.role = role
        self.index = index
        self.launch = launch
        self.name = process_name(role, index)
        self.endpoints = Endpoints(launch.run_dir)
        self.should_stop = False
        self._supervisor = Sender(self.endpoints.supervisor)
        self._last_beat = 0.0
        self._phase_started = time.monotonic()

    def beat(self) -> None:
        """Send a heartbeat, at most once a second. To be called in every turn of the main loop."""
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_INTERVAL_SECONDS:
            self._last_beat = now
            self._supervisor.try_send(Heartbeat(process=self.name))

    def announce_pause(self, seconds: float) -> None:
        """Report that the main loop will not beat for up to ``seconds``. The next heartbeat ends the pause."""
        self._last_beat = time.monotonic() - HEARTBEAT_INTERVAL_SECONDS
        self._supervisor.send(Heartbeat(process=self.name, pause_seconds=seconds))

    def report_phase(self, name: str, progress: float = 0.0) -> None:
        """Report that a start phase begins, or its progress (0 to 1)."""
        assert name in PHASES, name
        now = time.monotonic()
        self._supervisor.send(
            PhaseReport(process=self.name, phase=name, seconds=now - self._phase_started, progress=progress)
        )
        if progress == 0.0:
            self._phase_started = now

    def report_ready(self, *, kv_tokens: int = 0, port: int = 0) -> None:
        """Report that this process is ready to serve.

        Turns garbage collection on, which was off during the start, and freezes all objects made so far, so that
        no later collection scans them.
        """
        gc.collect()
        gc.freeze()
        gc.enable()
        self._supervisor.send(Ready(process=self.name, kv_tokens=kv_tokens, port=port))
        self.beat()

    def report_serving(self) -> None:
        """Report that the service accepts requests."""
        self._supervisor.send(Serving(process=self.name))

    def report_failure(self, error: Exception) -> None:
        """Report the error that ends this process. Nothing can be sent afterwards."""
        with contextlib.suppress(TransportError):
            self._supervisor.send(ProcessFailed(process=self.name, message=str(error)))
        close_sockets()

    def stop(self, _signal: int, _frame: object) -> None:
        """Handle SIGTERM."""
        self.should_stop = True


def process_name(role: Role, index: int) -> str:
    """Return a process's name: ``rank0``, ``tokenizer1``, ``api``."""
    return f"{role}{index}" if role in (Role.RANK, Role.TOKENIZER) else str(role)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; exit at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILURE)


def main(arguments: list[str]) -> int:
    """Run one role until it stops, and return its exit code. All its errors are handled here."""
    role, index, launch = Role(arguments[0]), int(arguments[1]), Launch.read(Path(arguments[2]))
    die_with_parent(int(arguments[3]))
    gc.disable()  # until ready: collections would take a sixth of the time of imports
    log.configure(process_name(role, index), launch.config.log_level)
    child = Child(role, index, launch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, child.stop)
    module, function = _MAINS[role]
    try:
        run: Callable[[Child], None] = getattr(importlib.import_module(module), function)
        run(child)
    except SkiffError as error:
        log.error("process_failed", error=type(error).__name__, message=str(error))
        child.report_failure(error)
        os._exit(EXIT_FAILURE)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the supervisor sees the exit code
        log.error("process_failed", exc_info=True, error=type(error).__name__, message=str(error))
        if isinstance(error, MemoryError) or type(error).__name__ == _TORCH_OUT_OF_MEMORY:
            child.report_failure(StartupError(f"out of memory: {str(error).partition('. ')[0]}"))
        os._exit(EXIT_FAILURE)  # not sys.exit: a thread of this process may hang
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
