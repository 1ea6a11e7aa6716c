"""The child processes of one service: start them, notice their exits, terminate them."""

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
"""Limit on the path of the run directory: a socket's path has at most 107 bytes."""
_MODULE: Final = "skiff_runtime.processes.child_process"


def make_run_dir() -> Path:
    """Make a private directory (mode 0700) for the sockets. Raises ``ConfigError`` if that is impossible."""
    try:
        made = Path(tempfile.mkdtemp(prefix="skiff-"))
    except OSError as error:
        raise ConfigError(f"cannot make a directory for sockets: {error}; set TMPDIR") from None
    if len(os.fsencode(made)) > MAX_DIRECTORY_BYTES:
        made.rmdir()
        raise ConfigError(f"the path {made.parent} is too long for sockets; set TMPDIR to a shorter one")
    return made


@dataclass(frozen=True, slots=True)
class ChildExit:
    """The exit of a child: its name, and its exit code or minus the signal that killed it."""

    name: str
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.code).name}"
        return f"{self.name} exited with code {self.code}"


class Children:
    """Starts the children of one launch, and adds their pidfds to the caller's poller."""

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        self._launch = launch
        self._poller = poller
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}

    def spawn(self, role: Role, index: int = 0) -> str:
        """Start one child; return its name."""
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
        """Names of the children whose exit ``reap`` has not returned yet, in the order of their start."""
        return list(self._running)

    def reap(self) -> list[ChildExit]:
        """Return the children that exited since the last call."""
        exits = []
        for name, child in list(self._running.items()):
            code = child.poll()
            if code is not None:
                exits.append(ChildExit(name, code))
                self._forget(name)
        return exits

    def terminate(self, timeout_seconds: float) -> list[ChildExit]:
        """Send SIGTERM to all, and SIGKILL to those that run after the timeout; return all exits."""
        for child in self._running.values():
            child.terminate()
        exits = self.wait(timeout_seconds)
        for child in self._running.values():
            child.kill()
        return exits + self.wait(timeout_seconds)

    def kill(self, name: str) -> None:
        """Send SIGKILL to one child, if it still runs."""
        if name in self._running:
            self._running[name].kill()

    def wait(self, timeout_seconds: float) -> list[ChildExit]:
        """Wait until every child has exited, or the timeout has passed; return the exits seen."""
        deadline = time.monotonic() + timeout_seconds
        exits = self.reap()
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._wait_one(left)
            exits += self.reap()
        return exits

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
