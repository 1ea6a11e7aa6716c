"""An HTTP/1.1 client on a raw connection, for requests that no client library would send."""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

HANG_SECONDS: Final = 60.0
"""A request without a whole response after this time counts as hung."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. ``whole`` False: the connection ended before the response did. ``status`` 0: before it began."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


def address_of(url: str) -> Address:
    """Return host and port of a service's URL."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def post(path: str, body: object, **headers: str) -> bytes:
    """Return a POST request with ``body``, as JSON unless it is bytes; header names have ``_`` for ``-``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, {**headers, "content_length": str(len(data))}) + data


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    """Return request line and headers."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class RawConnection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.lost = False
        self._closed = False
        self._fresh()

    @classmethod
    async def open(cls, address: Address, *, receive_buffer_bytes: int | None = None) -> "RawConnection":
        """Connect. With a small receive buffer, a client that does not read soon blocks the server."""
        raw = socket.socket()
        if receive_buffer_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HANG_SECONDS):
            await loop.sock_connect(raw, address)
        _, connection = await loop.create_connection(cls, sock=raw)
        return connection

    def _fresh(self) -> None:
        loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._whole = False
        self._status = 0
        self._begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

    def send(self, data: bytes) -> None:
        """Send a request, or a piece of one."""
        if self._ended.done() and not self.lost:
            self._fresh()
        self._transport.write(data)

    def finish_sending(self) -> None:
        """Close the sending half, and continue to read."""
        if not self.lost and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause(self) -> None:
        """Stop reading."""
        if not self.lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        if not self.lost:
            self._transport.resume_reading()

    def cut(self) -> None:
        """Abort the connection."""
        self.lost = True
        if not self._closed:  # asyncio's transport cannot be aborted once it is closed
            self._transport.abort()

    async def begun(self, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait for the first byte of a body, or for the end of the connection."""
        async with asyncio.timeout(timeout_seconds):
            await asyncio.wait((self._begun, self._ended), return_when=asyncio.FIRST_COMPLETED)

    async def reply(self, timeout_seconds: float = HANG_SECONDS) -> Reply:
        """Return the response, whole or cut short. Raises TimeoutError if neither it nor the end arrives."""
        async with asyncio.timeout(timeout_seconds):
            await asyncio.shield(self._ended)
        status = self._status if self._whole else self._parser.get_status_code() if self._headers else 0
        if self._headers.get("connection") == "close":
            self.lost = True
        return Reply(status, self._headers, bytes(self._body), self._whole)

    @property
    def received_bytes(self) -> int:
        """Number of bytes of the body that have arrived."""
        return len(self._body)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            self.cut()  # bytes without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.cut()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self._closed = True
        _resolve(self._ended)

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._whole:  # another response follows, to bytes behind the request's body
            return
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, piece: bytes) -> None:
        if not self._whole:
            self._body += piece
        _resolve(self._begun)

    def on_message_complete(self) -> None:
        if self._whole:
            return
        self._status = self._parser.get_status_code()
        if self._status == 100:  # the final response follows
            self._headers.clear()
            return
        self._whole = True
        _resolve(self._ended)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def send_request(address: Address, request: bytes, timeout_seconds: float = HANG_SECONDS) -> Reply:
    """Send one request over its own connection, and return the response."""
    connection = await RawConnection.open(address)
    try:
        connection.send(request)
        return await connection.reply(timeout_seconds)
    finally:
        connection.cut()
