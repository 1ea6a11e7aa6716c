"""The use of API keys' limits as one router reports it to its peers: ``GET /key-usage``.

A request names the version that the asking router has, and is answered when there is a later one, or after
``LONGEST_WAIT_SECONDS`` with nothing; the next one follows after ``REPORT_SECONDS``. So peers learn of a change within
twice that time, at any rate of changes, and see that the router is alive when there are none.
"""

import asyncio
from typing import Final
from urllib.parse import parse_qs

import msgspec

from skiff_router.limits import KeyUsage, RateLimiter
from skiff_runtime.api.http.asgi import Receive, Scope, Send
from skiff_runtime.api.http.responses import send_error, send_response
from skiff_runtime.errors import InvalidRequest

PATH: Final = "/key-usage"
REPORT_SECONDS: Final = 0.05
LONGEST_WAIT_SECONDS: Final = 5.0
MAX_WAITING: Final = 128
"""Requests that may wait for a change; others are answered at once. Anyone may send them, and each costs a timer."""


class KeyUsageReport(msgspec.Struct, frozen=True):
    """The body of a response. ``keys``: by name, those that have changed after the version of the request.

    A request that names another router, as one that met the process before this one does, gets all keys.
    """

    router: str
    version: int
    keys: dict[str, KeyUsage]


class KeyUsageApp:
    """The ASGI application of ``GET /key-usage?router=ID&version=NUMBER``."""

    def __init__(self, limiter: RateLimiter, router_id: str) -> None:
        self._limiter = limiter
        self._router_id = router_id
        self._waiting = 0
        self._closed = False

    def close(self) -> None:
        """Answer requests at once from now on, for the process ends."""
        self._closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        query = parse_qs(scope["query_string"])
        try:
            since = int(query.get(b"version", [b"0"])[0])
        except ValueError:
            error = InvalidRequest(
                "'version' must be the number of the last report, or 0 for all keys", param="version"
            )
            await send_error(scope, send, error)
            return
        if query.get(b"router", [b""])[0] != self._router_id.encode():
            since = -1
        if self._waiting < MAX_WAITING:
            self._waiting += 1
            try:
                await self._wait_for_change(since)
            finally:
                self._waiting -= 1
        report = KeyUsageReport(self._router_id, self._limiter.version, self._limiter.read_usage(since))
        await send_response(scope, send, 200, msgspec.json.encode(report))

    async def _wait_for_change(self, since: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LONGEST_WAIT_SECONDS
        while since >= self._limiter.version and not self._closed and loop.time() < deadline:  # noqa: ASYNC110 (rarer than changes)
            await asyncio.sleep(REPORT_SECONDS)
