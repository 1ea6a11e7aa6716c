"""Client for the load of ``skiff bench path``: prepared requests, and tokens counted without parsing the events.

It shares the machine with the processes that are measured, so it has to cost little itself.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec

from skiff_runtime.errors import SkiffError

TOKEN_MARK: Final = b'"content":'
"""Part of each event with text, and of the first event of a stream."""
_END: Final = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class TokenStream:
    """Arrival times of the pieces of one response, in monotonic seconds, and the number of tokens in each."""

    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    status: bytes = b""


class _Connection(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self) -> None:
        self.stream = TokenStream()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    async def send(self, request: bytes) -> TokenStream:
        """Send one request and wait for its whole response."""
        assert self._transport is not None
        self.stream, self._tail = TokenStream(time.monotonic()), b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        if b" 200 " not in self.stream.status:
            raise SkiffError(f"the server answered {self.stream.status.decode(errors='replace')}")
        return self.stream

    def data_received(self, data: bytes) -> None:
        stream = self.stream
        if not stream.status:
            stream.status = data.partition(b"\r\n")[0]
        count = data.count(TOKEN_MARK)
        if count:
            stream.arrivals.append(time.monotonic())
            stream.tokens.append(count)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(_END) or b" 200 " not in stream.status:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def encode_request(url: str, model: str, text: str, *, tokens: int) -> bytes:
    """Encode a whole HTTP request for a streamed chat completion of exactly ``tokens`` tokens."""
    address = urlsplit(url)
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_all(url: str, requests: Sequence[bytes], *, concurrency: int) -> list[TokenStream]:
    """Send requests over ``concurrency`` kept-alive connections, one at a time on each."""
    address = urlsplit(url)
    waiting = list(reversed(requests))
    streams: list[TokenStream] = []

    async def run_connection() -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, address.hostname or "", address.port or 80
        )
        try:
            while waiting:
                streams.append(await connection.send(waiting.pop()))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(run_connection())
    return streams
