"""ASGI types, and a writer that sends a response's ASGI messages from a callback, in order and without a task.

A server's ``send`` completes at once unless the client reads too slowly. So ``AsgiWriter`` drives the coroutine by
hand: the message has been sent when ``body`` returns. Only where ``send`` suspends does a task take over, and
further messages are collected, up to ``MAX_BACKLOG_BYTES`` and the bytes added by ``raise_backlog_limit``. A client
that lets more pile up is disconnected.

The pieces of a stream bypass ASGI and go straight to the connection where the server offers that
(``scope["extensions"][CHUNK_WRITER_EXTENSION]``): one ASGI message costs as much as the rest of a token's path through
this process.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Final, Protocol

MAX_BACKLOG_BYTES: Final = 1 << 20
CHUNK_WRITER_EXTENSION: Final = "skiff.chunks"
TRAILERS_EXTENSION: Final = "skiff.trailers"
"""A function ``MakeTrailedSend``: trailers of a chunked body."""
BODY_EXTENSION: Final = "skiff.body"
"""A function ``TakeBody``."""
WHOLE_RESPONSE_EXTENSION: Final = "skiff.response"
"""A function ``WriteResponse``."""
DISCONNECT_EXTENSION: Final = "skiff.disconnect"
"""A ``DisconnectSignal``: a call when the client leaves, without a task that waits for ``http.disconnect``."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
"""Pairs of a name in lower case and a value."""
WriteChunk = Callable[[bytes], bool]
"""Writes a piece of a body that has begun. Returns False if the piece must be sent as an ASGI message instead."""

TakeBody = Callable[[int], bytes | None]
"""Returns the body of the request if it has arrived in whole, and has at most this many bytes; else it must be received."""
WriteResponse = Callable[[int, Headers, bytes], bool]
"""Writes a complete response: status, headers with the length of the body, body. Returns False if it must be sent as ASGI
messages instead."""


class TrailedSend(Protocol):
    """The ASGI ``send`` of a response whose chunked body ends with ``trailers``. A body with a length has none."""

    trailers: Headers

    async def __call__(self, message: Message) -> None:
        """Send ``message``."""


MakeTrailedSend = Callable[[], TrailedSend]


class DisconnectSignal:
    """Calls one function when the client of a request disconnects before its response is complete."""

    __slots__ = ("_callback", "_disconnected", "_resume_reading")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """``resume_reading`` reads the connection again, which may have stopped behind a large body."""
        self._resume_reading = resume_reading
        self._callback: Callable[[], None] | None = None
        self._disconnected = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the client disconnects, or soon if it has. The body must be complete."""
        self._callback = callback
        self._resume_reading()  # the end of a connection that is not read goes unnoticed
        if self._disconnected:
            asyncio.get_running_loop().call_soon(callback)

    def notify(self) -> None:
        """Report that the client has disconnected."""
        if self._disconnected:
            return
        self._disconnected = True
        if self._callback is not None:
            self._callback()


class AsgiWriter:
    """The response to one request. ``closed``: the backlog overflowed, and nothing more is written."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_backlog_limit_bytes",
        "_on_overflow",
        "_send",
        "_task",
        "_write_chunk",
        "closed",
    )

    def __init__(
        self, send: Send, *, on_overflow: Callable[[], None], write_chunk: WriteChunk | None = None
    ) -> None:
        """``on_overflow`` is called once, when the backlog exceeds its limit."""
        self._send = send
        self._write_chunk = write_chunk
        self._on_overflow = on_overflow
        self._task: asyncio.Task[None] | None = None
        self._backlog: deque[Message] = deque()
        self._backlog_bytes = 0
        self._backlog_limit_bytes = MAX_BACKLOG_BYTES
        self.closed = False

    def raise_backlog_limit(self, extra_bytes: int) -> None:
        """Allow ``extra_bytes`` more to pile up, for output that arrives faster than any client could read it."""
        self._backlog_limit_bytes += extra_bytes

    def start(self, status: int, headers: Headers) -> None:
        """Send the status line and the headers."""
        self._write({"type": "http.response.start", "status": status, "headers": headers})

    def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body; ``more`` is False for the last one."""
        # While the task runs, every piece has to queue behind the message that it is sending.
        write_chunk = self._write_chunk if more and data and self._task is None and not self.closed else None
        if write_chunk is None or not write_chunk(data):
            self._write({"type": "http.response.body", "body": data, "more_body": more})

    def _write(self, message: Message) -> None:
        if self.closed:
            return
        if self._task is not None:
            self._collect(message)
            return
        suspended = start_awaitable(self._send(message))
        if suspended is not None:
            self._task = asyncio.get_running_loop().create_task(self._drain(suspended))

    def _collect(self, message: Message) -> None:
        self._backlog.append(message)
        self._backlog_bytes += len(message.get("body", b""))
        if self._backlog_bytes > self._backlog_limit_bytes:
            self.closed = True
            self._backlog.clear()
            self._on_overflow()

    async def _drain(self, first: "StartedAwaitable") -> None:
        """Finish the suspended send, then send the collected messages, joined into as few as possible."""
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


class StartedAwaitable:
    """An awaitable that has run to its first suspension, where it yielded ``waiting``; ``steps`` is the rest of it."""

    __slots__ = ("_steps", "_waiting")

    def __init__(self, steps: Generator[Any, Any, None], waiting: Any) -> None:
        self._steps = steps
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waiting
        yield from self._steps


def start_awaitable(awaitable: Awaitable[None]) -> StartedAwaitable | None:
    """Run an awaitable to its first suspension; return what is left to await, or None if it has completed."""
    steps = awaitable.__await__()
    try:
        return StartedAwaitable(steps, next(steps))
    except StopIteration:
        return None
