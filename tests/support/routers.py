"""Routers for tests, in the test's own event loop or as processes, and a client that sees each byte of their responses."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import uvloop
from fake_pod import Answer, FakePod, pods

from skiff_router.config import RouterConfig
from skiff_router.kubernetes_watch import ClusterAccess
from skiff_router.server import RouterServer
from skiff_router.upstream import Address

EXIT_SECONDS: Final = 30


def run(test: Coroutine[Any, Any, None], timeout_seconds: float = 60) -> None:
    """Run a test in an event loop of uvloop, as the router's process does."""
    uvloop.run(asyncio.wait_for(test, timeout_seconds))


def make_config(backends: Mapping[str, tuple[Address, ...]], **changes: Any) -> RouterConfig:
    """Return a configuration for loopback."""
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "backends": dict(backends),
        "kubernetes": False,
        "namespaces": (),
        "policy": "round-robin",
        "api_key_file": None,
        "limits_file": None,
        "peers": (),
        "usage_log": None,
        "backend_api_key_file": None,
        "first_byte_timeout_seconds": 30.0,
        "drain_timeout_seconds": 10.0,
        "max_waiting_requests": 64,
        "max_waiting_bytes": 1 << 20,
        "waiting_timeout_seconds": 30.0,
        "max_request_bytes": 1 << 20,
        "max_connections": 256,
        "log_level": "warning",
    }
    return RouterConfig(**{**options, **changes})


@dataclass(frozen=True)
class RunningRouter:
    """A router that listens. ``stopped``: its server's task."""

    server: RouterServer
    stopped: asyncio.Task[None]
    client: httpx.AsyncClient

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        """Send a JSON body."""
        return await self.client.post(path, content=json.dumps(body), **options)

    def stream(self, path: str) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        """Begin a request whose response the caller reads piece by piece."""
        return self.client.stream("POST", path, content=b'{"model": "a", "stream": true}')

    async def metrics(self) -> dict[str, float]:
        """Return the samples of the metrics page by name with labels."""
        page = (await self.client.get("/metrics")).text
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait, for 15 s at most, until ``condition`` is true."""
    async with asyncio.timeout(15):
        while not await condition():  # noqa: ASYNC110 (what is awaited happens in a pod or a client, which sends no event)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def routed(*answers: Answer, **changes: Any) -> AsyncIterator[tuple[RunningRouter, list[FakePod]]]:
    """Run a pod for each answer, all of the model "a", and a router in front of them."""
    async with pods(*answers) as started:
        config = make_config({"a": tuple(pod.address for pod in started)}, **changes)
        async with router(config) as running:
            yield running, started


@contextlib.asynccontextmanager
async def router(config: RouterConfig, access: ClusterAccess | None = None) -> AsyncIterator[RunningRouter]:
    """Run a router until the end of the block."""
    server = RouterServer(config, access)
    serving = asyncio.get_running_loop().create_task(server.serve())
    try:
        async with asyncio.timeout(30):
            while server.port is None:
                assert not serving.done(), serving
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client:
            yield RunningRouter(server, serving, client)
    finally:
        server.stop()
        await serving


@contextlib.contextmanager
def router_process(*flags: str) -> Iterator[tuple[str, int]]:
    """Run a router as a process on a free port until the end of the block. Yields its URL and its process id.

    Its log level must be info, for the log says which port it is.
    """
    command = [sys.executable, "-m", "skiff_router", "--port=0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"router_listening host=\S+ port=(\d+)", line):
                break
        else:
            raise AssertionError(f"the router ended with {process.wait()}")
        # What it writes later is read, so that its log never blocks it.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"http://127.0.0.1:{match[1]}", process.pid
    finally:
        process.terminate()
        process.wait(EXIT_SECONDS)
