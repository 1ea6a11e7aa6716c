"""Reads pages of metrics from serving pods, past the API server, whose proxy would need a right to all that any pod serves.

Anything may answer at a pod's address: the size and the time are bounded, redirects are not followed, and no cookie is
kept. Reading is best effort. A pod that does not answer in time has no page.
"""

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import Final

import aiohttp

from skiff_operator.response_body import read_body
from skiff_runtime import contract

_CONNECTIONS: Final = 16
_PAGE_SECONDS: Final = 1.0
_ALL_SECONDS: Final = 5.0
_MAX_PAGE_BYTES: Final = 1 << 20


async def read_pages(addresses: Sequence[str]) -> list[str | None]:
    """Read the pages of the pods at these IP addresses, all at the same time; None for one that does not answer in time."""
    pages: list[str | None] = [None] * len(addresses)

    async def read(session: aiohttp.ClientSession, index: int) -> None:
        host = url_host(addresses[index])
        if not host:
            return
        url = f"http://{host}:{contract.API_PORT}{contract.PATH_METRICS}"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status == 200:
                    pages[index] = (await read_body(response, _MAX_PAGE_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return

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
    return pages


def url_host(address: str) -> str:
    """Return an IP address as the host of a URL; empty for any other text, which could change the meaning of the URL."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if "%" in address:
        return ""
    return f"[{address}]" if found.version == 6 else address
