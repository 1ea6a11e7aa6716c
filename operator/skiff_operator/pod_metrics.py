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


async def read_metrics(addresses: Sequence[str], reduce: Callable[[str], T | None]) -> list[T | None]:
    """Read the pages of the pods at these IP addresses, all at the same time, and return what `reduce` makes of each.

    It is None for a pod that does not answer in time.
    """
    found: list[T | None] = [None] * len(addresses)

    async def read(session: aiohttp.ClientSession, index: int) -> None:
        host = url_host(addresses[index])
        if not host:
            return
        url = f"http://{host}:{contract.API_PORT}{contract.PATH_METRICS}"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return
                page = await read_body(response, _MAX_PAGE_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        found[index] = reduce(page.decode(errors="replace"))

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PAGE_SECONDS, sock_read=_PAGE_SECONDS)
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, cookie_jar=jar, trust_env=False
    ) as session:
        tasks = [asyncio.create_task(read(session, index)) for index in range(len(addresses))]
        if tasks:
            try:
                await asyncio.wait(tasks, timeout=_ALL_SECONDS)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return found


def url_host(address: str) -> str:
    """Return an IP address as the host of a URL; empty for any other text, which could change the meaning of the URL."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if "%" in address:
        return ""
    return f"[{address}]" if found.version == 6 else address
