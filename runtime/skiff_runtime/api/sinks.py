"""Where the rows of one request go: a stream of events, or one JSON body at the end.

Nothing is written before the first row, so a request that fails earlier gets a real 4xx or 5xx status.
"""

from typing import Protocol

from skiff_runtime.api.error_replies import error_body, error_headers
from skiff_runtime.api.generation import ReplyFormat
from skiff_runtime.api.writer import Headers, Writer
from skiff_runtime.errors import RequestError
from skiff_runtime.messages import NO_TOKEN, Finish, RequestFailed, Usage


class Sink(Protocol):
    """Takes the rows of one request, in order; exactly one of ``finish`` and ``fail`` is the last."""

    def write(self, text: str, token: int) -> None:
        """One increment."""
        ...

    def finish(self, text: str, token: int, finish: Finish, usage: Usage) -> None:
        """The last row."""
        ...

    def fail(self, error: RequestFailed) -> None:
        """The request ended with an error."""
        ...


class StreamSink:
    """Server-sent events, each written when its row arrives."""

    __slots__ = ("_headers", "_reply", "_started", "_writer")

    def __init__(self, writer: Writer, reply: ReplyFormat, headers: Headers) -> None:
        self._writer = writer
        self._reply = reply
        self._headers = headers
        self._started = False

    def write(self, text: str, token: int) -> None:
        data = self._reply.delta(text, token)
        if not self._started:
            data = self._start() + data
        if data:
            self._writer.body(data, more=True)

    def finish(self, text: str, token: int, finish: Finish, usage: Usage) -> None:
        data = self._reply.delta(text, token) + self._reply.closing(finish, usage)
        if not self._started:
            data = self._start() + data
        self._writer.body(data, more=False)

    def fail(self, error: RequestFailed) -> None:
        if self._started:
            self._writer.body(b"data: " + error_body(error) + b"\n\n", more=False)
        else:
            write_error(self._writer, error, self._headers)

    def _start(self) -> bytes:
        self._started = True
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        self._writer.start(200, [*kind, *self._headers])
        return self._reply.opening()


class WholeSink:
    """One JSON body, written when the last row has arrived."""

    __slots__ = ("_headers", "_reply", "_texts", "_tokens", "_writer")

    def __init__(self, writer: Writer, reply: ReplyFormat, headers: Headers) -> None:
        self._writer = writer
        self._reply = reply
        self._headers = headers
        self._texts: list[str] = []
        self._tokens: list[int] = []

    def write(self, text: str, token: int) -> None:
        self._texts.append(text)
        if token != NO_TOKEN:
            self._tokens.append(token)

    def finish(self, text: str, token: int, finish: Finish, usage: Usage) -> None:
        self.write(text, token)
        write_json(
            self._writer,
            200,
            self._reply.whole("".join(self._texts), self._tokens, finish, usage),
            self._headers,
        )

    def fail(self, error: RequestFailed) -> None:
        write_error(self._writer, error, self._headers)


class NullSink:
    """For a request that nobody listens to any more; its end is still awaited."""

    def write(self, text: str, token: int) -> None:
        pass

    def finish(self, text: str, token: int, finish: Finish, usage: Usage) -> None:
        pass

    def fail(self, error: RequestFailed) -> None:
        pass


def write_json(writer: Writer, status: int, body: bytes, headers: Headers) -> None:
    """A whole response with a JSON body."""
    length = str(len(body)).encode()
    writer.start(status, [(b"content-type", b"application/json"), (b"content-length", length), *headers])
    writer.body(body, more=False)


def write_error(writer: Writer, error: RequestError | RequestFailed, headers: Headers) -> None:
    """A whole response with an error body."""
    write_json(writer, error.status, error_body(error), [*headers, *error_headers(error)])
