"""Clients that cost little themselves: requests written as bytes, tokens counted as they come in."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec

from skiff_runtime.errors import SkiffError

EVENT: Final = b'"content":'
"""In each event with text, and once more in the opening one."""
_END: Final = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Stream:
    """When the pieces of one answer came, and how many tokens with each; monotonic seconds."""

    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    status: bytes = b""


class _Exchange(asyncio.Protocol):
    """One connection, which asks one thing after the other."""

    def __init__(self) -> None:
        self.stream = Stream()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    async def ask(self, request: bytes) -> Stream:
        """Send one request; what came back."""
        assert self._transport is not None
        self.stream, self._tail = Stream(time.monotonic()), b""
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
        count = data.count(EVENT)
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


def request(url: str, model: str, text: str, *, tokens: int) -> bytes:
    """A streamed chat completion of exactly so many tokens, ready to be written."""
    place = urlsplit(url)
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
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_all(
    url: str, requests: Sequence[bytes], *, concurrency: int, spread_seconds: float = 0.0
) -> list[Stream]:
    """Send each request over one of ``concurrency`` kept connections, whose starts lie spread over a while."""
    place = urlsplit(url)
    waiting = list(reversed(requests))
    streams: list[Stream] = []

    async def serve(number: int) -> None:
        await asyncio.sleep(spread_seconds * number / concurrency)
        _, exchange = await asyncio.get_running_loop().create_connection(
            _Exchange, place.hostname or "", place.port or 80
        )
        try:
            while waiting:
                streams.append(await exchange.ask(waiting.pop()))
        finally:
            exchange.close()

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(serve(number))
    return streams
