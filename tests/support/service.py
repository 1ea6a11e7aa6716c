"""A whole ``skiff serve`` with every process, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import httpx
import psutil

from skiff_runtime.metrics.exposition import METRICS_TTL_SECONDS

DEVICE: Final = os.environ.get("SKIFF_TEST_DEVICE", "cpu")
START_SECONDS: Final = 120.0
END_SECONDS: Final = 30.0
_READY: Final = re.compile(r" service_ready url=(\S+)")


@dataclass
class Service:
    """A running service. ``children``: its processes by name, such as ``rank0``."""

    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    url: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False, timeout=END_SECONDS))

    @property
    def children(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if len(words) < 5:
                continue  # it has not executed its program yet
            role, index = words[3:5]
            found[f"{role}{index}" if role in ("rank", "tokenizer") else role] = child
        return found

    def log_text(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode()

    def wait_exit(self) -> int:
        return self.process.wait(END_SECONDS)

    def metric(self, line: str) -> float:
        """Return the value of the metric sample that begins with ``line``."""
        time.sleep(METRICS_TTL_SECONDS)  # the metrics page may be this old
        page = self.http.get(self.url + "/metrics").text.splitlines()
        [value] = [each.rpartition(" ")[2] for each in page if each.startswith(line + " ")]
        return float(value)


@contextmanager
def running_service(
    model: Path | str, *flags: str, ready: bool = True, environment: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """Serve ``model`` on a free port; kill every process of the service at the end.

    ``environment``: variables that differ from those of this process.
    """
    command = [sys.executable, "-m", "skiff_runtime", "serve", "--model", str(model), "--port", "0"]
    command += ["--device", DEVICE]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--cpu-threads", "1", *flags],
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
        service = Service(process, log)
        try:
            if ready:
                service.url = wait_ready(service)
            yield service
        finally:
            family = [process.pid, *(child.pid for child in _descendants(process.pid))]
            for pid in family:
                _kill(pid)
            process.wait()
            service.http.close()
            if " process_failed " in service.log_text():
                print(service.log_text())  # pytest shows it if a test has failed


def wait_until(condition: Callable[[], bool], timeout_seconds: float = END_SECONDS) -> None:
    """Wait for ``condition``; fail the test if it does not become true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def wait_ready(service: Service) -> str:
    """Wait for the line in the log that announces the service, and return the URL in it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = _READY.search(service.log_text())
        if found:
            return found.group(1)
        assert service.process.poll() is None, f"the service ended:\n{service.log_text()}"
        time.sleep(0.05)
    raise AssertionError(f"the service was not ready in time:\n{service.log_text()}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
