"""Routers for tests, in the test's own event loop, and a client that sees each byte of their responses."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fake_pod import Answer, FakePod, pods

from skiff_router.config import RouterConfig
from skiff_router.kubernetes_watch import ClusterAccess
from skiff_router.server import RouterServer
from skiff_router.upstream import Address


def make_config(backends: Mapping[str, tuple[Address, ...]], **changes: Any) -> RouterConfig:
    """Return a configuration for loopback."""
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "backends": dict(backends),
        "kubernetes": False,
        "namespace": None,
        "policy": "round-robin",
        "api_key_file": None,
        "backend_api_key": "",
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
