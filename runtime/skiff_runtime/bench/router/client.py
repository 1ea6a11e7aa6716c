"""The client of ``skiff bench router``: kept-alive connections that count events and note the time of the first byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Literal, cast

import httptools
import msgspec

from skiff_runtime import contract
from skiff_runtime.bench.router.stub_pods import MODEL

ANSWER_SECONDS: Final = 10.0
"""A response without a byte for so long is taken for lost."""
Ending = Literal["complete", "error event", "cut", "silent"]


@dataclass(slots=True)
class Reply:
    """The response to a request, as far as it came.

    ``status`` is 0 without a response. ``first_byte_seconds``: from the request to the first byte of the body. ``ending``:
    "complete", also for an error with a status; "error event": a stream that ended with one; "cut": the connection ended before
    the response did; "silent": nothing came for ``ANSWER_SECONDS``.
    """

    status: int = 0
    first_byte_seconds: float = 0.0
    events: int = 0
    ending: Ending = "cut"


def make_body(prompt: str, *, events: int = 0) -> bytes:
    """Return the body of a chat request: for a whole response, or for a stream of ``events`` events if that is not 0."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": max(1, events)}
    return msgspec.json.encode({**fields, "stream": events > 0})


class Connection(asyncio.Protocol):
    """One connection; its requests follow one another."""

    def __init__(self, key: str) -> None:
        self._authorization = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._reply = Reply()
        self._has_error = False
        self._began = self._heard = 0.0

    async def send(self, body: bytes) -> Reply:
        """Send a request and wait for the end of its response."""
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        self._parser, self._reply, self._has_error = httptools.HttpResponseParser(self), Reply(), False
        self._done = loop.create_future()
        self._began = self._heard = loop.time()
        if self._transport.is_closing():
            return self._reply
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        path = contract.PATH_CHAT_COMPLETIONS.encode()
        self._transport.write(head % (path, self._authorization, len(body)) + body)
        await self._wait(self._done)
        return self._reply

    @property
    def is_open(self) -> bool:
        """Return whether further requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, done: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        while not done.done():
            left = self._heard + ANSWER_SECONDS - loop.time()
            if left <= 0:
                self._reply.ending = "silent"
                self.close()
                return
            await asyncio.wait([done], timeout=left)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        if self._parser is None or self._transport is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._reply.first_byte_seconds:
            self._reply.first_byte_seconds = self._heard - self._began
        self._reply.events += body.count(b"\n\n")
        self._has_error = self._has_error or b'"error"' in body

    def on_message_complete(self) -> None:
        streams = self._reply.events > 0
        self._reply.ending = "error event" if streams and self._has_error else "complete"
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


@contextlib.asynccontextmanager
async def connections(port: int, count: int, key: str = "") -> AsyncIterator[list[Connection]]:
    """Open connections to a port of loopback, and close them at the end of the block."""
    opened: list[Connection] = []
    try:
        while len(opened) < count:
            opened.append(await connect(port, key))
        yield opened
    finally:
        for each in opened:
            each.close()


async def connect(port: int, key: str = "") -> Connection:
    """Open one connection."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(key), "127.0.0.1", port)
    return connection
