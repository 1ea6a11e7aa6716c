"""Processes of Skiff that are forked from one process, which has imported their program once.

The imports take two seconds of CPU time for the frontend processes of a test, and one for an operator. The commands
themselves run in every test of ``skiff serve``, and in those of upgrades of the operator.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import IO, Final


class Program(StrEnum):
    """The program of a forked process."""

    CHILD = "child"
    """A child process of ``skiff serve``."""
    OPERATOR = "operator"


MODULES: Final = {
    Program.CHILD: (
        "skiff_runtime.api.server",
        "skiff_runtime.tokenizer.tokenizer_worker",
        "skiff_runtime.tokenizer.detokenizer",
    ),
    Program.OPERATOR: ("skiff_operator.__main__",),
}
"""Modules that are imported before the forks; they start no threads."""
MAX_REQUEST_BYTES: Final = 1 << 17
_STDIO: Final = (1, 2)


class ForkedProcess:
    """A running process, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self._exit_code: int | None = None
        self.pid = self._receive()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises ``subprocess.TimeoutExpired``."""
        if self._exit_code is None:
            self._report.settimeout(timeout_seconds)
            try:
                self._exit_code = self._receive()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout_seconds or 0) from None
            self._report.close()
        return self._exit_code

    def _receive(self) -> int:
        message = self._report.recv(64)
        assert message, "the process that forks the others has ended"
        return int(message)


def fork_process(
    program: Program,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> ForkedProcess:
    """Start a process with ``arguments``; those of a child process lack the id of its parent, which is added.

    By default it has this process's environment, standard output and standard error.
    """
    _, requests = _start_server(program)
    variables = [
        f"{name}={value}" for name, value in (os.environ if environment is None else environment).items()
    ]
    message = "\0".join([str(len(arguments)), *arguments, *variables]).encode()
    streams = _STDIO if output is None else (output.fileno(), output.fileno())
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(requests, [message], [*streams, theirs.fileno()])
    return ForkedProcess(report)


@cache
def _start_server(program: Program) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start the process that forks those of ``program``, and return it with its socket, whose closing ends it."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "forked_processes", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return server, requests


def _serve(requests: socket.socket, defaults: Mapping[str, str]) -> list[str] | None:
    """Fork a process for each request. Returns the arguments in a forked one, and None when all requests have been made.

    ``defaults`` are environment variables that the imported modules have set.
    """
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
                return _become(message.decode().split("\0"), descriptors, defaults)
            for descriptor in descriptors:
                os.close(descriptor)
            _send(report, pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close, in a forked process, what belongs to the others."""
    for key in list(selector.get_map().values()):
        if key.data is not None:
            os.close(key.fd)
            key.data[1].close()
    selector.close()


def _become(message: Sequence[str], descriptors: Sequence[int], defaults: Mapping[str, str]) -> list[str]:
    """Take over the environment and the standard output and error of a request, and return its arguments."""
    for descriptor, standard in zip(descriptors, _STDIO, strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    count = int(message[0])
    os.environ.clear()
    os.environ.update(defaults)
    for each in message[count + 1 :]:
        name, _, value = each.partition("=")
        os.environ[name] = value
    return list(message[1 : count + 1])


def _send(report: socket.socket, number: int) -> None:
    try:
        report.send(str(number).encode())
    except OSError:
        return  # the test has ended meanwhile


def _run(program: Program, arguments: list[str]) -> int:
    if program is Program.CHILD:
        from skiff_runtime.processes import child_process

        return child_process.main([*arguments, str(os.getppid())])
    from kubernetes.aio.config import kube_config

    from skiff_operator import __main__ as operator

    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]  # which it read when it was imported
    sys.argv[1:] = arguments
    return operator.main()


def main() -> int:
    """Import the program, and fork its processes."""
    program, descriptor = Program(sys.argv[1]), int(sys.argv[2])
    before = set(os.environ)
    for module in MODULES[program]:
        importlib.import_module(module)
    defaults = {name: value for name, value in os.environ.items() if name not in before}
    gc.freeze()  # no forked process scans these objects
    arguments = _serve(socket.socket(fileno=descriptor), defaults)
    return 0 if arguments is None else _run(program, arguments)


if __name__ == "__main__":
    sys.exit(main())
