"""A lean HTTP/1.1 client: asyncio protocol and C parser, no layer between a token and its timestamp.

A general client costs tens of microseconds an event, which on a shared machine is load of
its own and lag in what is measured.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from skiff_runtime.bench.online.request_record import Exchange
from skiff_runtime.config.api_keys import check_api_keys
from skiff_runtime.errors import ConfigError

IDLE_SECONDS: Final = 2.0
"""A connection idle for longer is not used again: the server may be about to close it."""
CONNECT_SECONDS: Final = 10.0


class Target:
    """Where requests go; a pool of connections to it."""

    def __init__(self, url: str, path: str, *, key: str | None = None) -> None:
        """``key`` is sent as a bearer token. ConfigError for a URL that is none, or a key that no header takes."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, not {url!r}")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        if key is not None:
            check_api_keys((key,), "--api-key")
        authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._head = (
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []

    async def send(self, body: bytes, exchange: Exchange) -> Callable[[], None]:
        """Write one request; ``exchange`` follows its answer. Returns what cuts it off.

        Raises OSError or TimeoutError when no connection can be made.
        """
        connection = self._take_idle() or await self._connect()
        connection.start(exchange, b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        return connection.abort

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().abort()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and time.perf_counter() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle), self._host, self._port, ssl=self._ssl
            )
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with one request on it at a time."""

    def __init__(self, idle: "list[_Connection]") -> None:
        self.closed = False
        self.idle_since = 0.0
        self._idle = idle
        self._exchange: Exchange | None = None
        self._now = 0.0

    def start(self, exchange: Exchange, request: bytes) -> None:
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        exchange.sent_at = time.perf_counter()
        self._transport.write(request)

    def abort(self) -> None:
        self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # nothing was asked for
            self.abort()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed answer", str(error))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail("connection lost", str(error) if error else "the server closed it")

    def _fail(self, kind: str, detail: str) -> None:
        if self._exchange is not None:
            self._exchange.ended_at = time.perf_counter()
            self._exchange.fail(kind, detail)
            self._exchange = None

    # Called by the parser.

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.begin(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.take(piece, self._now)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
            self._idle.append(self)
        else:
            self._transport.close()
        if exchange is not None:
            exchange.end(self._now)
