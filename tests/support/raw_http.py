"""HTTP/1.1 over a bare socket: requests that no client library would send, answers read to their last byte."""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

HANG_SECONDS: Final = 60.0
"""Whoever has no whole reply after so long counts as hung."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. ``whole`` False: the connection ended before the reply did; ``status`` 0: before it began."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


def address_of(url: str) -> Address:
    """Host and port of a service's URL."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def post(path: str, body: object, **headers: str) -> bytes:
    """A POST with ``body``, as JSON unless it is bytes already; header names are written with ``_`` for ``-``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, {**headers, "content_length": str(len(data))}) + data


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    """Request line and headers."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Line(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.lost = False
        self._closed = False
        self._fresh()

    @classmethod
    async def open(cls, address: Address, *, receive_buffer_bytes: int | None = None) -> "Line":
        """Connect; a small receive buffer makes a reader that soon holds up the server."""
        made = socket.socket()
        if receive_buffer_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        made.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HANG_SECONDS):
            await loop.sock_connect(made, address)
        _, line = await loop.create_connection(cls, sock=made)
        return line

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
        """Write a request, or a piece of one."""
        if self._ended.done() and not self.lost:
            self._fresh()
        self._transport.write(data)

    def finish_sending(self) -> None:
        """Say that no more will come, but go on reading."""
        if not self.lost and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause(self) -> None:
        """Read no more for now."""
        if not self.lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self.lost:
            self._transport.resume_reading()

    def cut(self) -> None:
        """Leave at once."""
        self.lost = True
        if not self._closed:  # asyncio's transport cannot be aborted once it has sent its rest and closed
            self._transport.abort()

    async def begun(self, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait for the first byte of a body, or for the end."""
        async with asyncio.timeout(timeout_seconds):
            await asyncio.wait((self._begun, self._ended), return_when=asyncio.FIRST_COMPLETED)

    async def reply(self, timeout_seconds: float = HANG_SECONDS) -> Reply:
        """The reply, whole or cut short. Raises TimeoutError where neither comes."""
        async with asyncio.timeout(timeout_seconds):
            await asyncio.shield(self._ended)
        status = self._status if self._whole else self._parser.get_status_code() if self._headers else 0
        if self._headers.get("connection") == "close":
            self.lost = True
        return Reply(status, self._headers, bytes(self._body), self._whole)

    @property
    def received_bytes(self) -> int:
        """How much of the body is here."""
        return len(self._body)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            self.cut()  # more than was asked for
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

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._whole:  # another reply follows, to bytes behind the request's length
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
        if self._status == 100:  # the reply is still to come
            self._headers.clear()
            return
        self._whole = True
        _resolve(self._ended)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def ask(address: Address, request: bytes, timeout_seconds: float = HANG_SECONDS) -> Reply:
    """One request over a connection of its own."""
    line = await Line.open(address)
    try:
        line.send(request)
        return await line.reply(timeout_seconds)
    finally:
        line.cut()
