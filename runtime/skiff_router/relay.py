"""The way of one response from a pod to a client: held back while a retry is possible, then passed on as it arrives.

A response that fits ``MAX_BUFFERED_BYTES`` and has a length is passed on when it is complete, so that a client never
gets a part of a JSON body. A stream of events is passed on in whole events, so that the error event which ends a broken
one is understood. Each piece goes from the parser's callback directly to the client's connection; only a client that
reads slowly costs a task, and then reading from the pod pauses until the client has caught up.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from skiff_router.token_usage import TokenUsage, read_body_usage, read_stream_usage
from skiff_router.upstream import Headers, UpstreamConnection, UpstreamError
from skiff_runtime.api.http.asgi import (
    CHUNK_WRITER_EXTENSION,
    WHOLE_RESPONSE_EXTENSION,
    Scope,
    Send,
    StartedAwaitable,
    start_awaitable,
)
from skiff_runtime.api.http.request_headers import get_header
from skiff_runtime.api.http.usage_header import USAGE_HEADER, parse_usage_header

MAX_BUFFERED_BYTES: Final = 1 << 20
"""Largest complete response that is held back until its end."""
MAX_EVENT_BYTES: Final = 1 << 20
"""Bound on the part of an event that is held back; a longer event is passed on in pieces."""
REFUSALS: Final = (429, 503)
"""Statuses by which a pod says that it did not begin the request: another pod may take it."""
EVENT_STREAM: Final = b"text/event-stream"
_BODILESS: Final = (204, 304)
_DROPPED: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",  # the router's server adds its own
        b"server",
        b"x-request-id",  # these two are among the headers of every response of the router
        b"request-id",
        USAGE_HEADER,  # for the router alone
    }
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response that was held back: the client has received no byte of it."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """A response that was passed on to its end."""

    status: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A response that failed. ``begun``: the client has a part of it, so it cannot be retried."""

    error: UpstreamError
    begun: bool


Outcome = Reply | Streamed | Broken


class ClientWriter:
    """The client's side of a response. While the client reads too slowly, the pod's connection is not read."""

    def __init__(self, scope: Scope, send: Send, headers: Headers) -> None:
        """``headers``: those that every response of the router to this request carries."""
        self._send = send
        self._headers = headers
        self._write_chunk = scope["extensions"][CHUNK_WRITER_EXTENSION]
        self._write_response = scope["extensions"][WHOLE_RESPONSE_EXTENSION]
        self._backlog: deque[bytes] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._source: UpstreamConnection | None = None
        self.has_begun = False
        """True if the response began as a stream of events before a pod had the request."""

    async def send_whole(self, reply: Reply) -> None:
        """Send a complete response. Its length is that of its body: a pod's 304 may have the length of another one."""
        headers = [
            header for header in reply.headers if header[0] not in _DROPPED and header[0] != b"content-length"
        ]
        if reply.status not in _BODILESS:
            headers.append((b"content-length", b"%d" % len(reply.body)))
        headers += self._headers
        if self._write_response(reply.status, headers, reply.body):
            return
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": reply.body, "more_body": False})

    def begin(self, status: int, headers: Headers, source: UpstreamConnection) -> None:
        """Begin a response whose pieces follow; ``source`` is paused while the client cannot take more.

        If it has begun while its request waited for a pod, the head of the pod's response is dropped.
        """
        self._source = source
        if self._draining is not None:
            source.pause()
        if not self.has_begun:
            self._write_head(status, headers)

    def begin_events(self) -> None:
        """Begin a stream of events before a pod has the request."""
        self._write_head(200, [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache")])
        self.has_begun = True

    def _write_head(self, status: int, headers: Headers) -> None:
        kept = [header for header in headers if header[0] not in _DROPPED]
        kept += self._headers
        suspended = start_awaitable(
            self._send({"type": "http.response.start", "status": status, "headers": kept})
        )
        if (
            suspended is not None
        ):  # the client pipelined this request, and has not read the previous response yet
            self._begin_drain(suspended)

    def release_source(self) -> None:
        """Leave the pod's connection alone from now on: its response is complete, and it may carry the next one."""
        self._source = None

    def write(self, data: bytes) -> None:
        """Write a piece of the body, not empty."""
        if self._draining is None and self._write_chunk(data):
            return
        self._backlog.append(data)
        if self._draining is None:
            self._begin_drain()

    async def end(self) -> None:
        """Write the end of the body."""
        if self._draining is not None:
            await self._draining
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def cancel(self) -> None:
        """Drop what is not written: the client has left."""
        if self._draining is not None:
            self._draining.cancel()

    def _begin_drain(self, head: StartedAwaitable | None = None) -> None:
        if self._source is not None:
            self._source.pause()
        self._draining = asyncio.get_running_loop().create_task(self._drain(head))

    async def _drain(self, head: StartedAwaitable | None) -> None:
        """Send the backlog, behind a head that the client's connection could not take at once."""
        if head is not None:
            await head
        while self._backlog:
            data = b"".join(self._backlog)
            self._backlog.clear()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._draining = None
        if self._source is not None:
            self._source.resume()


class Relay:
    """The receiver of one attempt's response. ``outcome`` is set at its end; ``first_byte_at`` is 0 before its first byte."""

    def __init__(self, writer: ClientWriter, connection: UpstreamConnection) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.first_byte_at = 0.0
        self._writer = writer
        self._connection = connection
        self._status = 0
        self._headers: Headers = []
        self._trailers: Headers = []
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._events = False
        self._tail = b""
        self._separator = b""
        self._last = self._before_last = b""
        self._num_events = 0

    @property
    def begun(self) -> bool:
        """Return whether the client has a part of the response."""
        return self._status != 0 and self._held is None

    def on_head(self, status: int, headers: Headers) -> None:
        """Hold the response back, or begin to pass it on."""
        self.first_byte_at = self._loop.time()
        self._status, self._headers = status, headers
        length, content_type = MAX_BUFFERED_BYTES + 1, b""
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                length = int(value)
            elif name == b"content-type":
                content_type = value
        if status in REFUSALS or length <= MAX_BUFFERED_BYTES or (status != 200 and self._writer.has_begun):
            self._held = []
            return
        self._events = content_type.startswith(EVENT_STREAM)
        self._writer.begin(status, headers, self._connection)

    def on_data(self, data: bytes) -> None:
        """Hold a piece back, or pass it on."""
        if self._held is not None:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > MAX_BUFFERED_BYTES:
                self._pass_on_held()
            return
        if not self._events:
            self._writer.write(data)
            return
        separator = self._separator
        if separator and not self._tail and data.endswith(separator):
            self._pass_on_events(data)
            return
        data = self._tail + data
        if not separator:
            separator = self._separator = _find_separator(data)
        end = data.rfind(separator) + len(separator) if separator and separator in data else 0
        if len(data) - end > MAX_EVENT_BYTES:
            end = len(data)
        self._tail = data[end:]
        if end:
            self._pass_on_events(data[:end])

    def on_end(self) -> None:
        """End the attempt with the response, or with its end."""
        self._trailers = self._connection.trailers  # now, before the next request on this connection
        if self._tail:
            self._pass_on_events(self._tail)
            self._tail = b""
        if self._held is not None:
            self._set(Reply(self._status, self._headers, b"".join(self._held)))
        else:
            self._writer.release_source()
            self._set(Streamed(self._status))

    def on_failure(self, error: UpstreamError) -> None:
        """End the attempt with its failure."""
        self._set(Broken(error, self.begun))

    @property
    def is_event_stream(self) -> bool:
        """Return whether the response is a stream of events, whose client understands an error event."""
        return self._events

    def read_usage(self, estimated_prompt: int) -> TokenUsage:
        """Return the token counts of the response, or of what there was of it.

        ``estimated_prompt``: the tokens of the prompt if no count of them has arrived.
        """
        if self._status >= 400:
            return TokenUsage()
        for headers in (self._trailers, self._headers):
            reported = parse_usage_header(get_header(headers, USAGE_HEADER))
            if reported is not None and reported[1]:
                return TokenUsage.exact(reported[0])
        if reported is not None:  # a stream of Skiff without its end
            prompt, cached, _ = reported[0]
            return TokenUsage(prompt, cached, self._num_events, estimated=True)
        found = None
        if self._events:
            found = read_stream_usage(self._before_last + self._last)
        elif self._held is not None:
            found = read_body_usage(b"".join(self._held)) or TokenUsage()
        return found or TokenUsage(estimated_prompt, 0, self._num_events, estimated=True)

    def _pass_on_events(self, data: bytes) -> None:
        """Pass whole events on. The last two pieces are kept for the usage, which the last events may have."""
        self._before_last, self._last = self._last, data
        self._num_events += data.count(self._separator) if self._separator else 0
        self._writer.write(data)

    def _pass_on_held(self) -> None:
        """Give up to hold back a response that is longer than it said, or a refusal of that size."""
        held, self._held = self._held or [], None
        self._writer.begin(self._status, self._headers, self._connection)
        self._writer.write(b"".join(held))

    def _set(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _find_separator(data: bytes) -> bytes:
    """Return the empty line that ends events, by the first line of a stream; b"" while its line end is not known.

    Lines end with LF, CR LF or CR; servers use one of them throughout.
    """
    line_feed, carriage_return = data.find(b"\n"), data.find(b"\r")
    if carriage_return < 0 or 0 <= line_feed < carriage_return:
        return b"\n\n" if line_feed >= 0 else b""
    following = data[carriage_return + 1 : carriage_return + 2]
    if not following:
        return b""
    return b"\r\n\r\n" if following == b"\n" else b"\r\r"
