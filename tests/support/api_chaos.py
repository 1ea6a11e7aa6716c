"""A proxy in front of a real API server that disturbs an operator at random: late, refused, lost and cut requests.

What it refuses never reached the API server; of what it loses, only the response is lost, so the write has happened.
All choices come from one seed, though their order depends on the operator's requests.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web
from fault_proxy import FaultProxy


class Refusal(NamedTuple):
    """An error response of an API server: its code and the reason in its Status."""

    code: int
    reason: str


BUSY: Final = (
    Refusal(429, "TooManyRequests"),
    Refusal(500, "InternalError"),
    Refusal(503, "ServiceUnavailable"),
)
CONFLICT: Final = Refusal(409, "Conflict")
EXPIRED: Final = Refusal(410, "Expired")
RETRY_AFTER_SECONDS: Final = 1
WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")

LATE: Final = 0.2
LATEST_SECONDS: Final = 0.4
REFUSED: Final = 0.12
LOST: Final = 0.05
WATCH_REFUSED: Final = 0.2
WATCH_SECONDS: Final = 4.0
"""Mean time after which a watch is cut."""


@dataclass
class ChaosProxy(FaultProxy):
    """Disturbs while `active`; counts in `succeeded` requests that the API server fulfilled, by method, and in `disturbed` what it did."""

    seed: int = 0
    active: bool = False
    succeeded: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Seed the choices."""
        self._random = random.Random(self.seed)

    @property
    def writes(self) -> int:
        """Writes that the API server fulfilled, without renewals of the Lease."""
        return sum(self.succeeded[method] for method in WRITES)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Pass on or disturb a request; one that cannot be completed ends in a reset connection."""
        try:
            return await self._pass_or_disturb(request)
        except (aiohttp.ClientError, ConnectionError):
            self._reset(request)
            return web.Response()

    async def _pass_or_disturb(self, request: web.Request) -> web.StreamResponse:
        if "/leases" in request.raw_path:
            return await super()._answer(request)
        if not self.active:
            return await self._pass(request)
        if self._random.random() < LATE:
            self.disturbed["late"] += 1
            await asyncio.sleep(self._random.uniform(0, LATEST_SECONDS))
        if "watch" in request.query:
            return await self._disturb_watch(request)
        if self._random.random() < REFUSED:
            return self._refuse(self._refusal_of(request))
        if self._random.random() < LOST:
            return await self._lose(request)
        return await self._pass(request)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        response = await super()._answer(request)
        self.succeeded[request.method] += response.status < 400
        return response

    async def _disturb_watch(self, request: web.Request) -> web.StreamResponse:
        if self._random.random() < WATCH_REFUSED:
            refusal = self._random.choice((*BUSY, EXPIRED))
            return self._refuse(refusal, in_stream=self._random.random() < 0.5)
        delay = self._random.expovariate(1 / WATCH_SECONDS)
        cut = asyncio.get_running_loop().call_later(delay, self._cut_watch, request)
        try:
            return await super()._answer(request)
        finally:
            cut.cancel()

    def _cut_watch(self, request: web.Request) -> None:
        self.disturbed["watch cut"] += 1
        self._reset(request)

    def _reset(self, request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()

    def _refusal_of(self, request: web.Request) -> Refusal:
        """Choose an error that an API server gives to such a request."""
        if request.method in WRITES:
            return self._random.choice((*BUSY, CONFLICT))
        return self._random.choice((*BUSY, EXPIRED) if "limit" in request.query else BUSY)

    def _refuse(self, refusal: Refusal, *, in_stream: bool = False) -> web.Response:
        self.disturbed[str(refusal.code)] += 1
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": "as the test asks",
            "reason": refusal.reason,
            "code": refusal.code,
        }
        if in_stream:
            return web.Response(text=json.dumps({"type": "ERROR", "object": status}) + "\n")
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if refusal.code == 429 else {}
        return web.json_response(status, status=refusal.code, headers=headers)

    async def _lose(self, request: web.Request) -> web.Response:
        """Pass the request on, and reset the connection in place of a response."""
        self.disturbed["lost"] += 1
        body = await request.read() or None
        async with self._http.request(
            request.method, f"{self._server}{request.raw_path}", headers=self._headers(request), data=body
        ) as reply:
            await reply.read()
            self.succeeded[request.method] += reply.status < 400
        self._reset(request)
        return web.Response()
