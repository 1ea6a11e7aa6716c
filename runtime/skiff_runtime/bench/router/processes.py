"""The processes of ``skiff bench router``: stub pods, and a router with all that it starts."""

import asyncio
import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psutil

from skiff_runtime.bench.cpu_time import read_cpu_seconds
from skiff_runtime.bench.router import stub_pods
from skiff_runtime.bench.router.client import connections, make_body
from skiff_runtime.errors import ConfigError, SkiffError

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
KEY: Final = "bench-key"
_LOG_TAIL_CHARACTERS: Final = 2000
_POLL_SECONDS: Final = 0.1
SKIFF: Final = "skiff"
_SKIFF_COMMAND: Final = (
    f"{shlex.quote(sys.executable)} -m skiff_router --port {{port}} {{skiff_backends}} --api-key-file {{directory}}/keys "
    "--limits-file {directory}/limits.json --usage-log {directory}/usage.jsonl"
)
_URLS: Final = "--host 127.0.0.1 --port {port} --worker-urls {urls} --policy cache_aware --prometheus-port {metrics_port}"
KNOWN: Final = {
    SKIFF: _SKIFF_COMMAND,
    "vllm-router": f"vllm-router {_URLS}",
    "sglang-router": f"sglang-router launch {_URLS}",
    "smg": f"smg launch {_URLS}",
    "haproxy": "haproxy -q -f {directory}/haproxy.cfg",
    "nginx": "nginx -c {directory}/nginx.conf -p {directory}",
}
"""Commands of routers, with the names of ``expand``. Skiff's checks keys and limits, counts and logs."""


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def expand(command: str, *, port: int, backends: Sequence[int], directory: Path) -> list[str]:
    """Return the words of a router's command, with these names replaced.

    ``{port}``: where it shall listen; ``{metrics_port}``: another free one; ``{urls}``: the pods' addresses, separated by
    spaces; ``{skiff_backends}``: these as flags of ``skiff router``; ``{directory}``: a directory with configuration files.
    Raises ConfigError for another name.
    """
    urls = [f"http://127.0.0.1:{each}" for each in backends]
    names = {
        "port": str(port),
        "metrics_port": str(free_ports(1)[0]),
        "urls": " ".join(urls),
        "skiff_backends": " ".join(f"--backend {stub_pods.MODEL}={url}" for url in urls),
        "directory": str(directory),
    }
    try:
        return shlex.split(command.format(**names))
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--peer: {command!r} has a name that is none of {', '.join(names)}: {error}"
        ) from None


def write_configurations(directory: Path, port: int, backends: Sequence[int]) -> None:
    """Write the files that the known commands read."""
    (directory / "keys").write_text(f"bench: {KEY}\n")
    limit = (
        '{"default": {"requestsPerMinute": 10000000, "tokensPerMinute": 10000000000, "concurrency": 100000}}'
    )
    (directory / "limits.json").write_text(limit)
    servers = "\n".join(f"  server pod{i} 127.0.0.1:{each} check inter 1s" for i, each in enumerate(backends))
    (directory / "haproxy.cfg").write_text(
        "global\n  maxconn 8192\n  nbthread 1\n"
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 600s\n  timeout server 600s\n"
        "  option redispatch 1\n  retries 2\n  retry-on conn-failure empty-response\n"
        f"frontend api\n  bind 127.0.0.1:{port}\n  default_backend pods\n"
        f"backend pods\n  balance roundrobin\n{servers}\n"
    )
    pods = "\n".join(f"    server 127.0.0.1:{each};" for each in backends)
    (directory / "nginx.conf").write_text(
        "worker_processes 1; daemon off; pid nginx.pid; error_log stderr;\n"
        "events { worker_connections 8192; }\n"
        "http {\n  access_log off; client_max_body_size 64m;\n"
        f"  upstream pods {{\n{pods}\n    keepalive 512;\n  }}\n"
        f"  server {{\n    listen 127.0.0.1:{port};\n    location / {{\n      proxy_pass http://pods;\n"
        '      proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;\n'
        "      proxy_read_timeout 600s; proxy_next_upstream error timeout non_idempotent;\n    }\n  }\n}\n"
    )


@dataclass
class StubProcess:
    """A process of stub pods, one for each of ``ports``. It can be killed and started again on the same ports."""

    ports: Sequence[int]
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start it, and wait until every pod answers."""
        words = [sys.executable, "-m", "skiff_runtime.bench.router.stub_pods", *map(str, self.ports)]
        self._process = subprocess.Popen(words)
        deadline = time.monotonic() + START_SECONDS
        for port in self.ports:
            while not _listens(port):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise SkiffError("the stub pods did not start; a port may be taken")
                time.sleep(_POLL_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def statistics(self) -> list[stub_pods.Statistics]:
        """Return the statistics of each pod since the last call, and begin new ones, with empty caches."""
        found = []
        for port in self.ports:
            reply = httpx.delete(f"http://127.0.0.1:{port}{stub_pods.STATISTICS_PATH}", timeout=10)
            fields = reply.json()
            found.append(stub_pods.Statistics(fields["requests"], fields["blocks"], fields["cached"]))
        return found


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@dataclass(frozen=True)
class RunningRouter:
    """A router that answers. ``key``: the API key that its clients send, empty for none."""

    name: str
    port: int
    key: str
    process: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """Return its processes."""
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes so far. Raises SkiffError if one has ended."""
        try:
            return sum(read_cpu_seconds(each.pid) for each in self.processes())
        except (OSError, psutil.Error) as error:
            raise SkiffError(f"{self.name} ended during the measurement: {error}") from error

    def memory_bytes(self) -> int:
        """Return the memory of its processes; what they share counts once."""
        return sum(each.memory_full_info().pss for each in self.processes())


@contextlib.contextmanager
def run_router(name: str, command: str, backends: Sequence[int]) -> Iterator[RunningRouter]:
    """Run a router until the end of the block. Raises SkiffError if it does not answer a request in time."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="skiff-bench-router-") as folder:
        directory = Path(folder)
        write_configurations(directory, port, backends)
        log = directory / "log"
        words = expand(command, port=port, backends=backends, directory=directory)
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(words, stdout=output, stderr=output, cwd=directory)
            except OSError as error:
                raise SkiffError(f"{name} cannot be started: {error}") from None
        running = RunningRouter(name, port, KEY if name == SKIFF else "", psutil.Process(process.pid))
        try:
            asyncio.run(_wait_until_it_serves(running, process, log))
            yield running
        finally:
            _stop(running, process)


async def _wait_until_it_serves(router: RunningRouter, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError):
            async with connections(router.port, 1, router.key) as [connection]:
                if (await connection.send(make_body("ready?"))).status == 200:
                    return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SkiffError(f"{router.name} did not serve a request:\n{_read_tail(log)}")
        await asyncio.sleep(_POLL_SECONDS)


def _read_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]


def _stop(router: RunningRouter, process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = router.process.children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs([router.process, *children], timeout=STOP_SECONDS)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
