"""Reads pages of metrics from serving pods, past the API server, whose proxy would need a right to all that any pod serves.

Anything may answer at a pod's address: the size and the time are bounded, redirects are not followed, and no cookie is
kept. A page is reduced to what is needed of it as soon as it has arrived, so that many large ones do not lie in memory.
Reading is best effort. A pod that does not answer in time has no page.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import aiohttp

from skiff_operator.response_body import read_body
from skiff_runtime import contract

T = TypeVar("T")

_CONNECTIONS: Final = 16
_PAGE_SECONDS: Final = 1.0
_ALL_SECONDS: Final = 5.0
_MAX_PAGE_BYTES: Final = 1 << 20


class MetricsReader:
    """Reads pages over connections that stay open, for pods that are read again and again."""

    def __init__(self, *, connections: int = _CONNECTIONS) -> None:
        """Open at most `connections` at a time."""
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def read(self, addresses: Sequence[str], reduce: Callable[[str], T | None]) -> list[T | None]:
        """Read the pages of the pods at these IP addresses, all at the same time, and return what `reduce` makes of each.

        It is None for a pod that does not answer in time.
        """
        found: list[T | None] = [None] * len(addresses)

        async def read(index: int) -> None:
            page = await self._get(addresses[index])
            found[index] = None if page is None else reduce(page)

        tasks = [asyncio.create_task(read(index)) for index in range(len(addresses))]
        if tasks:
            try:
                await asyncio.wait(tasks, timeout=_ALL_SECONDS)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, address: str) -> str | None:
        """Return the page of a pod, or None."""
        host = url_host(address)
        if not host:
            return None
        url = f"http://{host}:{contract.API_PORT}{contract.PATH_METRICS}"
        try:
            async with self._pool().get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return None
                page = await read_body(response, _MAX_PAGE_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return page.decode(errors="replace")

    def _pool(self) -> aiohttp.ClientSession:
        """Return the session, made on first use because it belongs to the running event loop."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PAGE_SECONDS, sock_read=_PAGE_SECONDS)
            self._session = pod_session(self._connections, timeout)
        return self._session


async def read_metrics(addresses: Sequence[str], reduce: Callable[[str], T | None]) -> list[T | None]:
    """Read the pages of pods once, as `MetricsReader.read` does."""
    reader = MetricsReader()
    try:
        return await reader.read(addresses, reduce)
    finally:
        await reader.close()


def pod_session(connections: int, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """Return a session of at most `connections` for requests to pods, of the running event loop: no cookies, no proxies."""
    return aiohttp.ClientSession(
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def url_host(address: str) -> str:
    """Return an IP address as the host of a URL; empty for any other text, which could change the meaning of the URL."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if "%" in address:
        return ""
    return f"[{address}]" if found.version == 6 else address
