"""Child processes of Skiff that are forked from one process, which has imported their programs once.

The imports of the frontend processes take two seconds of CPU time for each test that starts its own.
``python -m skiff_runtime.processes.child_process`` itself is started by every test that runs ``skiff serve``.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Final

PROGRAMS: Final = (
    "skiff_runtime.api.server",
    "skiff_runtime.tokenizer.tokenizer_worker",
    "skiff_runtime.tokenizer.detokenizer",
)
"""Modules that are imported before the forks; they start no threads."""
MAX_REQUEST_BYTES: Final = 1 << 17
_STDIO: Final = (1, 2)


class ForkedChild:
    """A running child process, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self._exit_code: int | None = None
        self.pid = self._receive()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises TimeoutError."""
        if self._exit_code is None:
            self._report.settimeout(timeout_seconds)
            self._exit_code = self._receive()
            self._report.close()
        return self._exit_code

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code is None:
            os.kill(self.pid, number)

    def _receive(self) -> int:
        message = self._report.recv(64)
        assert message, "the process that forks the children has ended"
        return int(message)


def fork_child(*arguments: str) -> ForkedChild:
    """Start a child process with ``arguments``, to which the id of its parent process is added.

    It has this process's environment, standard output and standard error.
    """
    _, requests = _start_server()
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    message = "\0".join([str(len(arguments)), *arguments, *environment]).encode()
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(requests, [message], [*_STDIO, theirs.fileno()])
    return ForkedChild(report)


@cache
def _start_server() -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start the process that forks the children, and return it with its socket, whose closing ends it."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "forked_children", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return server, requests


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork a child for each request. Returns the child's arguments in a child, and None when all requests have been made."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                pid, report = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _send(report, os.waitstatus_to_exitcode(status))
                report.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, len(_STDIO) + 1)
            if not message:
                return None
            report = socket.socket(fileno=descriptors.pop())
            if (pid := os.fork()) == 0:
                _close_all(selector)
                report.close()
                requests.close()
                return _become(message.decode().split("\0"), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _send(report, pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close, in a child, what belongs to the other children."""
    for key in list(selector.get_map().values()):
        if key.data is not None:
            os.close(key.fd)
            key.data[1].close()
    selector.close()


def _become(message: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """Take over the environment and the standard output and error of a request, and return its arguments."""
    for descriptor, standard in zip(descriptors, _STDIO, strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    count = int(message[0])
    os.environ.clear()
    for each in message[count + 1 :]:
        name, _, value = each.partition("=")
        os.environ[name] = value
    return [*message[1 : count + 1], str(os.getppid())]


def _send(report: socket.socket, number: int) -> None:
    try:
        report.send(str(number).encode())
    except OSError:
        return  # the test has ended meanwhile


if __name__ == "__main__":
    for module in PROGRAMS:
        importlib.import_module(module)
    gc.freeze()  # no child scans these objects
    from skiff_runtime.processes.child_process import main

    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(0 if arguments is None else main(arguments))
