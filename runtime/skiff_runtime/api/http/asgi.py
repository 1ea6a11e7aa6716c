"""Writes ASGI messages from a callback: in order, without a task and without waiting.

A server's ``send`` finishes at once unless the client reads too slowly. So it is driven by hand: the message is
on its way when ``write`` returns. Only where ``send`` waits does a task take over, while what follows is
collected, up to ``MAX_BACKLOG_BYTES`` and what ``raise_backlog_limit`` adds; a client that lets more pile up is given up. The pieces of a stream go
straight to the connection, where the server lends it (``scope["extensions"][CHUNKS]``): an ASGI message costs as
much as the rest of a token's way through this process.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Final

MAX_BACKLOG_BYTES: Final = 1 << 20
CHUNK_WRITER_EXTENSION: Final = "skiff.chunks"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
WriteChunk = Callable[[bytes], bool]
"""Writes a piece of a body that has begun; False where it must be sent as a message instead."""


class AsgiWriter:
    """One response. ``on_overflow`` is called once, when the backlog grew too large; nothing is written after."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_chunk",
        "_limit_bytes",
        "_on_overflow",
        "_send",
        "_task",
        "closed",
    )

    def __init__(
        self, send: Send, *, on_overflow: Callable[[], None], chunk: WriteChunk | None = None
    ) -> None:
        self._send = send
        self._chunk = chunk
        self._on_overflow = on_overflow
        self._task: asyncio.Task[None] | None = None
        self._backlog: deque[Message] = deque()
        self._backlog_bytes = 0
        self._limit_bytes = MAX_BACKLOG_BYTES
        self.closed = False

    def raise_backlog_limit(self, extra_bytes: int) -> None:
        """Let so much more pile up, of what comes faster than anyone could read it."""
        self._limit_bytes += extra_bytes

    def start(self, status: int, headers: Headers) -> None:
        """Write status line and headers."""
        self._write({"type": "http.response.start", "status": status, "headers": headers})

    def body(self, data: bytes, *, more: bool) -> None:
        """Write a piece of the body; the last one has ``more`` False."""
        chunk = self._chunk if more and data and self._task is None and not self.closed else None
        if chunk is None or not chunk(data):
            self._write({"type": "http.response.body", "body": data, "more_body": more})

    def _write(self, message: Message) -> None:
        if self.closed:
            return
        if self._task is not None:
            self._collect(message)
            return
        steps = self._send(message).__await__()
        try:
            waiting = next(steps)
        except StopIteration:
            return
        self._task = asyncio.get_running_loop().create_task(self._drain(_Resumed(steps, waiting)))

    def _collect(self, message: Message) -> None:
        self._backlog.append(message)
        self._backlog_bytes += len(message.get("body", b""))
        if self._backlog_bytes > self._limit_bytes:
            self.closed = True
            self._backlog.clear()
            self._on_overflow()

    async def _drain(self, first: "_Resumed") -> None:
        """Finish the send that waits, then send what was collected meanwhile, as few messages."""
        await first
        while self._backlog:
            message = self._backlog.popleft()
            if message["type"] == "http.response.body":
                pieces = [message, *self._backlog]
                self._backlog.clear()
                self._backlog_bytes = 0
                body = b"".join(piece["body"] for piece in pieces)
                message = {**message, "body": body, "more_body": pieces[-1]["more_body"]}
            await self._send(message)
        self._task = None


class _Resumed:
    """An awaitable that somebody began to drive: ``waiting`` is what it waits for, ``steps`` the rest of it."""

    __slots__ = ("_steps", "_waiting")

    def __init__(self, steps: Generator[Any, Any, None], waiting: Any) -> None:
        self._steps = steps
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waiting
        yield from self._steps
