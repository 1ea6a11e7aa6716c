"""A reverse proxy between an operator and a real API server that breaks connections as a test asks.

It speaks plain HTTP on a loopback port, so that a fault can concern one request or one watch; requests reach the
API server with the operator's own token. Faults choose requests by a regular expression over path and query.
"""

import asyncio
import json
import re
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import yaml
from aiohttp import web
from apiserver import credentials

T = TypeVar("T")
WATCH: Final = r"watch=true"
_NOT_FORWARDED: Final = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
_WAIT_SECONDS: Final = 30.0


@dataclass(eq=False)
class _Exchange:
    """One request that is being answered. `stalled`: its connection stays open and never carries a byte again."""

    line: str
    request: web.Request
    stalled: bool = False


@dataclass(eq=False)
class _Fault:
    """An answer for requests that match, instead of the API server's; `times` counts down."""

    pattern: str
    status: int
    times: int
    in_stream: bool


@dataclass
class FaultProxy:
    """The proxy, running on a thread of its own between `start` and `stop`."""

    kubeconfig: Path
    answered: list[str] = field(default_factory=list)
    """Path and query of each request that the API server has answered to the end with success."""
    expired: int = 0
    """Watches that the API server itself has ended with 410 Gone."""
    _faults: list[_Fault] = field(default_factory=list)
    _held: list[str] = field(default_factory=list)
    _live: list[_Exchange] = field(default_factory=list)
    _port: int = 0

    def start(self) -> None:
        """Listen on a free port."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open())

    def stop(self) -> None:
        """End every connection and the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)

    def through(self, kubeconfig: Path, path: Path) -> Path:
        """Write a copy of `kubeconfig` to `path` whose server is this proxy."""
        config = yaml.safe_load(kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._port}"}
        path.write_text(json.dumps(config))
        return path

    def refuse(self, pattern: str, status: int, times: int = 1_000_000, *, in_stream: bool = False) -> None:
        """Answer the next `times` matching requests with an error: as the reply's status, or as a watch's only event."""
        self._faults.append(_Fault(pattern, status, times, in_stream))

    def allow(self) -> None:
        """Take back every `refuse`."""
        self._faults.clear()

    def hold(self, pattern: str) -> None:
        """Stall matching requests, connections open: those under way for ever, others until `release`."""

        async def hold() -> None:
            self._held.append(pattern)
            for each in self._matching(pattern):
                each.stalled = True

        self._call(hold())

    def release(self) -> None:
        """Take back every `hold`; what was under way then stays stalled."""

        async def release() -> None:
            self._held.clear()
            async with self._changed:
                self._changed.notify_all()

        self._call(release())

    def cut(self, pattern: str) -> int:
        """Reset the connections of matching requests; how many there were."""

        async def cut() -> int:
            found = self._matching(pattern)
            for each in found:
                if each.request.transport is not None:
                    each.request.transport.abort()
            return len(found)

        return self._call(cut())

    def down(self) -> None:
        """Refuse connections, and reset those that there are."""
        self._call(self._shut())

    def up(self) -> None:
        """Listen again on the same port."""
        self._call(self._listen())

    def lists(self, plural: str, namespace: str = "") -> int:
        """Return the number of lists of a kind, in one namespace or anywhere, that were answered to the end."""
        place = re.escape(f"/namespaces/{namespace}/{plural}" if namespace else f"/{plural}")
        pattern = re.compile(rf"{place}(\?(?!.*{WATCH})(?!.*continue=)|$)")
        return sum(bool(pattern.search(line)) for line in self.answered)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_WAIT_SECONDS)

    async def _open(self) -> None:
        self._changed = asyncio.Condition()
        self._server, context = credentials(self.kubeconfig, with_user=False)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers={"Accept-Encoding": "identity"},  # the response loses the header that names an encoding
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await self._listen()

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await self._site.start()
        self._port = self._runner.addresses[0][1]

    async def _shut(self) -> None:
        await self._site.stop()
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            connection.force_close()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()

    def _matching(self, pattern: str) -> list[_Exchange]:
        return [each for each in self._live if re.search(pattern, each.line)]

    def _refusal(self, line: str) -> web.Response | None:
        for fault in self._faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                body = {
                    "kind": "Status",
                    "status": "Failure",
                    "code": fault.status,
                    "message": "as the test asks",
                }
                if fault.in_stream:
                    return web.Response(text=json.dumps({"type": "ERROR", "object": body}) + "\n")
                return web.json_response(body, status=fault.status)
        return None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        line = request.raw_path
        exchange = _Exchange(line, request)
        self._live.append(exchange)
        try:
            await self._passable(exchange)
            refusal = self._refusal(line)
            return await self._forward(exchange) if refusal is None else refusal
        finally:
            self._live.remove(exchange)

    async def _forward(self, exchange: _Exchange) -> web.StreamResponse:
        request = exchange.request
        headers = self._headers(request)
        body = await request.read() or None
        url = f"{self._server}{exchange.line}"
        async with self._http.request(request.method, url, headers=headers, data=body) as reply:
            kept = {
                name: reply.headers[name] for name in ("Content-Type", "Retry-After") if name in reply.headers
            }
            response = web.StreamResponse(status=reply.status, headers=kept)
            await self._passable(exchange)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await self._passable(exchange)
                self.expired += re.search(WATCH, exchange.line) is not None and b'"type":"ERROR"' in chunk
                await response.write(chunk)
            await self._passable(exchange)
            await response.write_eof()
        if reply.status < 400:
            self.answered.append(exchange.line)
        return response

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Return the headers that the API server receives."""
        return {name: text for name, text in request.headers.items() if name.lower() not in _NOT_FORWARDED}

    async def _passable(self, exchange: _Exchange) -> None:
        """Wait while the exchange is held; for ever when it is stalled."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_held(exchange))

    def _is_held(self, exchange: _Exchange) -> bool:
        return exchange.stalled or any(re.search(pattern, exchange.line) for pattern in self._held)


def watching(plural: str, namespace: str = "") -> str:
    """The pattern of watches of a kind, in one namespace or anywhere."""
    return _place(plural, namespace) + rf"\?.*{WATCH}"


def listing(plural: str, namespace: str = "") -> str:
    """The pattern of lists of a kind, in one namespace or anywhere."""
    return _place(plural, namespace) + rf"\?(?!.*{WATCH})"


def _place(plural: str, namespace: str) -> str:
    return re.escape(f"/namespaces/{namespace}/{plural}" if namespace else f"/{plural}")
