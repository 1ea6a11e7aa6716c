"""Adaptation of uvicorn's request/response cycle: chunks without ASGI messages, head and body in one write.

``uvicorn_internals`` lists the parts of uvicorn that this relies on.
"""

from collections.abc import Callable
from functools import partial

from skiff_runtime.api.http.asgi import (
    BODY_EXTENSION,
    CHUNK_WRITER_EXTENSION,
    DISCONNECT_EXTENSION,
    TRAILERS_EXTENSION,
    WHOLE_RESPONSE_EXTENSION,
    DisconnectSignal,
    Headers,
    Message,
)
from skiff_runtime.api.http.uvicorn_internals import STATUS_LINE, RequestResponseCycle


class CycleTransport:
    """The connection as a response sees it; closing it is left to the protocol."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(
        self, write: Callable[[bytes], None], close: Callable[[], None], is_closing: Callable[[], bool]
    ) -> None:
        """``write`` is the transport's own bound method: a wrapper would add a call for every token."""
        self.write = write
        self.close = close
        self.is_closing = is_closing


class CloseDelimited:
    """The ASGI ``send`` of a response to an HTTP/1.0 client, which knows no chunks: the connection's end ends the body."""

    __slots__ = ("_cycle", "_send")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send

    async def __call__(self, message: Message) -> None:
        """Send ``message`` without chunks; a Content-Length of the response is sent unchanged."""
        self._cycle.chunked_encoding = False
        self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]


class ChunkedBody:
    """One response's body, written without the ASGI messages that begin and end it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Write ``data``, not empty, as one chunk. Returns False if writing is paused or the body is not chunked."""
        cycle = self._cycle
        if cycle.flow.write_paused or not cycle.chunked_encoding or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class TrailedBody:
    """The ASGI ``send`` of a response whose body, if it is chunked, ends with ``trailers``: uvicorn knows none."""

    __slots__ = ("_cycle", "_send", "trailers")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self.trailers: Headers = []

    async def __call__(self, message: Message) -> None:
        """Send ``message``; with the body's last one the trailers."""
        cycle = self._cycle
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and self.trailers and cycle.chunked_encoding and not cycle.disconnected:
            body = message.get("body", b"")
            lines = b"".join(b"%b: %b\r\n" % header for header in self.trailers)
            ending = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n" + lines + b"\r\n"
            # uvicorn writes it as it is, and ends the response.
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(ending)
            message = {**message, "body": ending}
        await self._send(message)  # type: ignore[arg-type]


def take_body(cycle: RequestResponseCycle, max_bytes: int) -> bytes | None:
    """Return the request's body if it is complete, has at most ``max_bytes``, and no part of it was received before."""
    if cycle.more_body or cycle.disconnected or len(cycle.body) > max_bytes:
        return None
    body = bytes(cycle.body)
    cycle.body = bytearray()
    cycle.message_event.clear()
    return body


class WholeResponse:
    """One complete response, written without ASGI messages: for a short response these cost more than all else."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: CycleTransport) -> None:
        self._cycle = cycle
        self._transport = transport

    def write(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a response whose ``headers`` have the length of ``body``.

        Returns False, without a byte written, where the general way is needed: to a client that reads slowly, has left or
        waits for 100 Continue, for the last response of a connection, for HEAD and HTTP/1.0, and for a header that is not
        one line.
        """
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        if not cycle.keep_alive or cycle.waiting_for_100_continue or cycle.scope["method"] == "HEAD":
            return False
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        head = b"".join((STATUS_LINE[status], *lines))
        if not head.count(b"\n") == head.count(b"\r") == len(lines) + 1 or b"\r\nconnection:" in head:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        self._transport.write(b"%b\r\n%b" % (head, body))
        cycle.on_response()
        return True


class HeadCoalescer:
    """Transport of one response until its body begins: writes the head together with the first piece of the body.

    This takes one system call instead of two, and wakes the client once. 100 Continue, which precedes
    the head, is not held back.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Hold the head back; with the next piece, write both and restore the cycle's own transport."""
        if not self._cycle.response_started:
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        """Return whether the connection is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Write the head if it is held back, because no body followed, and close."""
        if self._head is not None:
            self._transport.write(self._head)
        self._transport.close()


def adapt_cycle(cycle: RequestResponseCycle, transport: CycleTransport) -> None:
    """Prepare a cycle before its application starts."""
    cycle.transport = transport  # type: ignore[assignment]
    if cycle.scope["http_version"] == "1.0":
        cycle.send = CloseDelimited(cycle)  # type: ignore[method-assign, assignment]
        cycle.waiting_for_100_continue = False
    if cycle.scope["method"] != "HEAD":
        cycle.transport = HeadCoalescer(cycle)  # type: ignore[assignment]
    cycle.scope["extensions"] = {
        CHUNK_WRITER_EXTENSION: ChunkedBody(cycle).write,  # type: ignore[dict-item]
        TRAILERS_EXTENSION: partial(TrailedBody, cycle),  # type: ignore[dict-item]
        BODY_EXTENSION: partial(take_body, cycle),  # type: ignore[dict-item]
        WHOLE_RESPONSE_EXTENSION: WholeResponse(cycle, transport).write,  # type: ignore[dict-item]
        DISCONNECT_EXTENSION: DisconnectSignal(cycle.flow.resume_reading),  # type: ignore[dict-item]
    }


def release_cycle(cycle: RequestResponseCycle, transport: CycleTransport) -> None:
    """Undo ``adapt_cycle`` behind a complete response.

    A cycle that refers to itself through these parts would keep all objects of its request until the garbage collector
    finds them, which takes a tenth of the CPU time of a short request.
    """
    cycle.transport = transport  # type: ignore[assignment]
    cycle.scope["extensions"] = {}


def notify_disconnect(cycle: RequestResponseCycle) -> None:
    """Signal the application of a cycle that its client has disconnected."""
    cycle.disconnected = True
    cycle.message_event.set()
    signal: DisconnectSignal = cycle.scope["extensions"][DISCONNECT_EXTENSION]  # type: ignore[assignment]
    signal.notify()
