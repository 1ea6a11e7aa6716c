"""Minimal HTTP/1.1 client: an asyncio protocol and a parser in C, with nothing between a token and its timestamp.

A general-purpose client takes tens of microseconds per event. On a machine that it shares with the server, that is
additional load, and it delays the timestamps.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from skiff_runtime.bench.online.request_record import RequestRecord
from skiff_runtime.config.api_keys import check_api_keys
from skiff_runtime.errors import ConfigError

IDLE_SECONDS: Final = 2.0
"""Time after which an idle connection is not reused, for the server may be about to close it."""
CONNECT_SECONDS: Final = 10.0


class HttpClient:
    """Pool of connections to one path of one server."""

    def __init__(self, url: str, path: str, *, key: str | None = None) -> None:
        """Prepare requests to ``url`` + ``path``; ``key`` is sent as a bearer token.

        Raises:
            ConfigError: the URL is malformed, or the key cannot be sent in a header.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--base-url must be like http://127.0.0.1:8000, not {url!r}")
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

    async def send(self, body: bytes, record: RequestRecord) -> Callable[[], None]:
        """Write one request, whose response ``record`` receives. Returns a function that aborts it.

        Raises:
            OSError, TimeoutError: no connection can be made.
        """
        connection = self._take_idle() or await self._connect()
        connection.start(record, b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
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
    """A connection, with one request at a time."""

    def __init__(self, idle: "list[_Connection]") -> None:
        self.closed = False
        self.idle_since = 0.0
        self._idle = idle
        self._record: RequestRecord | None = None
        self._now = 0.0

    def start(self, record: RequestRecord, request: bytes) -> None:
        self._record = record
        self._parser = httptools.HttpResponseParser(self)
        record.sent_at = time.perf_counter()
        self._transport.write(request)

    def abort(self) -> None:
        self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._record is None:  # data without a request
            self.abort()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed response", str(error))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail("connection lost", str(error) if error else "the server closed it")

    def _fail(self, kind: str, detail: str) -> None:
        if self._record is not None:
            self._record.ended_at = time.perf_counter()
            self._record.fail(kind, detail)
            self._record = None

    # Called by the parser.

    def on_headers_complete(self) -> None:
        if self._record is not None:
            self._record.begin(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._record is not None:
            self._record.receive(data, self._now)

    def on_message_complete(self) -> None:
        record, self._record = self._record, None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
            self._idle.append(self)
        else:
            self._transport.close()
        if record is not None:
            record.end(self._now)
