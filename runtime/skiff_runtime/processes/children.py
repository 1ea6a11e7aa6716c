"""The child processes of one service: spawn, notice an end, terminate."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from skiff_runtime.errors import ConfigError
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.launch import Launch, Role

MAX_DIRECTORY_BYTES: Final = 90
"""Leaves room for the longest name of a socket."""
_MODULE: Final = "skiff_runtime.processes.child_process"


def make_run_dir() -> Path:
    """A private directory (0700) for the sockets. Raises ``ConfigError`` where there can be none.

    Short, for a socket's path has 107 bytes at most.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix="skiff-"))
    except OSError as error:
        raise ConfigError(f"no directory for sockets can be made: {error}; set TMPDIR") from None
    if len(os.fsencode(made)) > MAX_DIRECTORY_BYTES:
        made.rmdir()
        raise ConfigError(f"the path of {made.parent} is too long for sockets; set TMPDIR to a shorter one")
    return made


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that has ended, and how."""

    name: str
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.code).name}"
        return f"{self.name} exited with code {self.code}"


class Children:
    """Starts children of one launch; their pidfds join the caller's poller."""

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        self._launch = launch
        self._poller = poller
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}

    def spawn(self, role: Role, index: int = 0) -> str:
        """Start one child; its name."""
        name = process_name(role, index)
        command = [
            sys.executable,
            "-m",
            _MODULE,
            role,
            str(index),
            str(self._launch.run_dir),
            str(os.getpid()),
        ]
        child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
        self._running[name] = child
        self._pidfds[name] = os.pidfd_open(child.pid)
        self._poller.register(self._pidfds[name], zmq.POLLIN)
        return name

    @property
    def running(self) -> list[str]:
        """Names of the children that have not been seen to end, in order of their start."""
        return list(self._running)

    def reap(self) -> list[Ended]:
        """The children that ended since the last call."""
        ended = []
        for name, child in list(self._running.items()):
            code = child.poll()
            if code is not None:
                ended.append(Ended(name, code))
                self._forget(name)
        return ended

    def terminate(self, timeout_seconds: float) -> list[Ended]:
        """SIGTERM to all, then SIGKILL to those that are still there after the timeout; how each ended."""
        for child in self._running.values():
            child.terminate()
        ended = self.wait(timeout_seconds)
        for child in self._running.values():
            child.kill()
        return ended + self.wait(timeout_seconds)

    def kill(self, name: str) -> None:
        """SIGKILL to one child that is still there."""
        if name in self._running:
            self._running[name].kill()

    def wait(self, timeout_seconds: float) -> list[Ended]:
        """Wait until every child has ended, or the time is up."""
        deadline = time.monotonic() + timeout_seconds
        ended = self.reap()
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._wait_one(left)
            ended += self.reap()
        return ended

    def _wait_one(self, timeout_seconds: float) -> None:
        poller = zmq.Poller()
        for fd in self._pidfds.values():
            poller.register(fd, zmq.POLLIN)
        poller.poll(int(timeout_seconds * 1000))

    def _forget(self, name: str) -> None:
        del self._running[name]
        fd = self._pidfds.pop(name)
        self._poller.unregister(fd)
        os.close(fd)
