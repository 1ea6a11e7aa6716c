"""Background processes of a cluster: started with a log, found again by a later command, stopped for certain."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commands import ClusterError, tail, wait_for

PATH_OF_NODE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PR_SET_PDEATHSIG = 1
SETTLE_SECONDS = 1.0
"""Time in which a process that was continued stops itself again, if it was about to."""


def start_time(pid: int) -> str | None:
    """Return the kernel's start time of a running process in clock ticks, or None when it is gone or a zombie."""
    fields = _read_stat(pid)
    return None if fields[0] in "ZX" else fields[19]


def is_stopped(pid: int) -> bool:
    """Say whether a process was stopped by a signal."""
    return _read_stat(pid)[0] == "T"


def _read_stat(pid: int) -> list[str]:
    """Return the fields of a process behind its name, as the kernel prints them: its state first, X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Daemon:
    """One background process; its pid and start time lie in `directory`/NAME.pid, its output in NAME.log.

    The start time distinguishes it from another process with the same pid after a reboot.
    """

    name: str
    directory: Path
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """The file that holds the process's output."""
        return self.directory / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        """The file that holds `PID START-TIME`."""
        return self.directory / f"{self.name}.pid"

    @property
    def pid(self) -> int | None:
        """The process's id while it runs, else None."""
        try:
            pid, started = self.pid_file.read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def start(self, argv: Sequence[str | Path], *, with_parent: bool = False) -> None:
        """Start the process in a session of its own, with a bare environment.

        `with_parent` ties its life to the starting process, so that an interrupted test leaves nothing behind.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._child = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": PATH_OF_NODE, "HOME": str(self.directory)},
                start_new_session=True,
                preexec_fn=_die_with_parent if with_parent else None,
            )
        started = start_time(self._child.pid)
        self.pid_file.write_text(f"{self._child.pid} {started}")

    def alive(self) -> bool:
        """Say whether the process runs."""
        if self._child is not None:
            self._child.poll()
        return self.pid is not None

    def require(self) -> None:
        """Raise ClusterError with the end of its log when the process has ended."""
        if not self.alive():
            raise ClusterError(f"{self.name} ended:\n{tail(self.log)}\n(all of it: {self.log})")

    def pause(self) -> None:
        """Stop the process, and those that it started, in the middle of their work. Raises ClusterError if it does not run."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`.

        nsenter stops itself when its child has stopped. If the pause came between the two, nsenter stops once more after it was
        continued. It must not stay stopped: it would never reap its child, and the node's end would wait for that zombie.
        """

        def runs() -> bool:
            self._signal(signal.SIGCONT)
            time.sleep(SETTLE_SECONDS)
            return not any(is_stopped(pid) for pid in self._pids())

        wait_for(f"the end of the pause of {self.name}", runs, timeout_seconds=20)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            os.kill(pid, number)

    def _pids(self) -> list[int]:
        """Return the ids of the process's children and its own: the node's programs are children of nsenter."""
        pid = self.pid
        if pid is None:
            raise ClusterError(f"{self.name} does not run")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [*map(int, children), pid]

    def stop(self, *, grace_seconds: float = 5) -> None:
        """End the process, with SIGKILL after `grace_seconds` of SIGTERM (0: at once), and wait until it is gone."""
        for number, patience in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
            pid = self.pid
            if pid is None:
                break
            if patience == 0:
                continue
            try:
                os.kill(pid, number)
                wait_for(
                    f"end of {self.name}",
                    lambda: not self.alive(),
                    timeout_seconds=patience,
                    interval_seconds=0.02,
                )
            except ProcessLookupError:
                break
            except ClusterError:
                if number == signal.SIGKILL:
                    raise
        self.pid_file.unlink(missing_ok=True)
