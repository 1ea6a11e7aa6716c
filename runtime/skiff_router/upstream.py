"""Connections to pods: HTTP/1.1 exchanges whose bytes go to callbacks as they arrive, and a pool for each address.

A client library would cost more than the rest of a request's way through the router, because it makes an object and a
wake-up of every piece of a stream. Here the parser calls the receiver of the response directly, from the event loop's
own callback for a readable socket.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, cast

import httptools

CONNECT_TIMEOUT_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 30.0
"""Shorter than a pod's own limit of 75 s, so that the router closes idle connections, and no request meets a closed one."""
MAX_IDLE_CONNECTIONS: Final = 64
MAX_HEAD_BYTES: Final = 1 << 16
MAX_TRAILERS: Final = 8
MAX_STATUS: Final = 599
WRITE_HIGH_WATER_BYTES: Final = 1 << 18

Headers = list[tuple[bytes, bytes]]
"""Pairs of a name in lower case and a value."""


class Address(NamedTuple):
    """The host and port of a pod."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bearer_line(key: str) -> str:
    """Return the header line of an API key or a token; "" without one."""
    return f"authorization: Bearer {key}\r\n" if key else ""


def format_get(address: Address, target: str, key: str = "") -> bytes:
    """Return a GET request. ``target``: the path, with its query. ``key``: an API key or a token, "" for none."""
    return f"GET {target} HTTP/1.1\r\nhost: {address}\r\n{bearer_line(key)}\r\n".encode()


class Failure(StrEnum):
    """Why an exchange ended without a complete response."""

    CONNECT = "connect"
    """No connection: refused, unreachable, or not within the time limit."""
    RESET = "reset"
    """The connection ended before the response was complete."""
    MALFORMED = "malformed"
    """The pod sent bytes that are not an HTTP/1.1 response."""
    TIMEOUT = "timeout"
    """No byte of the response arrived in time."""


class UpstreamError(Exception):
    """An exchange that ended without a complete response. ``reused``: it was not the first one of its connection."""

    def __init__(self, failure: Failure, message: str, *, reused: bool = False) -> None:
        super().__init__(message)
        self.failure = failure
        self.reused = reused


class ResponseReceiver(Protocol):
    """The receiver of one response. Its methods are called by the event loop, must not block, and must not raise."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Receive the status and the headers of the final response; informational responses are dropped."""

    def on_data(self, data: bytes) -> None:
        """Receive the next piece of the body, without its transfer encoding."""

    def on_end(self) -> None:
        """Receive the end of the response: the last call."""

    def on_failure(self, error: UpstreamError) -> None:
        """Receive the failure of the exchange: the last call, at any time."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to a pod, which carries one exchange at a time.

    States: idle (no receiver), or in an exchange. A connection is reused only if the response was complete, its
    request was sent in whole, and neither side asked for the end of the connection.
    """

    def __init__(
        self,
        on_idle: Callable[["UpstreamConnection"], None],
        on_lost: Callable[["UpstreamConnection"], None],
    ) -> None:
        """``on_idle`` is called after an exchange that leaves the connection usable, ``on_lost`` when it has ended."""
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._receiver: ResponseReceiver | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: Headers = []
        self.trailers: Headers = []
        """The trailers of the response that has ended last, or ends."""
        self._head_bytes = 0
        self._in_head = True
        self._close_delimited = False
        self._without_body = False
        self._reusable = False
        self._paused = False
        self._exchanges = 0
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, request: Sequence[bytes], receiver: ResponseReceiver, *, without_body: bool = False
    ) -> None:
        """Send a whole request, in pieces; the response goes to ``receiver``. ``without_body``: the method is HEAD."""
        assert self._transport is not None
        assert self._receiver is None
        self._receiver = receiver
        self._exchanges += 1
        self._without_body = without_body
        self._begin_message()
        self._transport.writelines(request)

    def pause(self) -> None:
        """Stop reading, until ``resume`` or the end of the response: the client does not take what arrives."""
        if self.is_open and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.is_open and self._paused:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    def abort(self, receiver: ResponseReceiver) -> None:
        """End the connection at once, without a call of ``receiver``; the pod notices that its client has left.

        No-op if the response is complete: the connection may carry the exchange of another receiver by now.
        """
        if self._receiver is not receiver:
            return
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports have the methods, but not the class.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the response."""
        if self._receiver is None:
            self._reusable = False
            self.close()  # bytes that no request asked for
            return
        assert self._parser is not None
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Failure.MALFORMED, f"the response is not valid HTTP/1.1: {error}")
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(Failure.MALFORMED, f"the head of the response exceeds {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> bool:
        """Let the transport close, which calls ``connection_lost``."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange that is under way."""
        self._transport = None
        if self._receiver is not None:
            if self._close_delimited and exc is None:
                self._end()
            else:
                reason = f"the connection was lost: {exc}" if exc is not None else "the connection was closed"
                self._fail(Failure.RESET, reason)
        self._on_lost(self)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Close the connection if a second message follows a response: it would be taken for the next response."""
        if self._receiver is None:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Those behind the body are trailers; the first ``MAX_TRAILERS`` are kept."""
        if self._in_head:
            self._headers.append((name.lower(), value))
        elif len(self.trailers) < MAX_TRAILERS:
            self.trailers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Pass the head on."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._headers = []
            return
        if not 200 <= status <= MAX_STATUS:
            self._fail(Failure.MALFORMED, f"the status is {status}, which HTTP does not have")
            return
        self._in_head = False
        lengths = [name for name, _ in self._headers if name in (b"content-length", b"transfer-encoding")]
        bodiless = self._without_body or status in (204, 304)
        self._close_delimited = not lengths and not bodiless
        self._reusable = self._parser.should_keep_alive() and not self._close_delimited
        if self._receiver is not None:
            self._receiver.on_head(status, self._headers)
        if self._without_body:
            self._end()  # the parser would wait for the body that Content-Length describes

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the body on."""
        if self._receiver is not None:
            self._receiver.on_data(data)

    def on_message_complete(self) -> None:
        """End the exchange, unless this was an informational response."""
        if not self._in_head:
            self._end()

    def _begin_message(self) -> None:
        # A parser of its own for each response: one that failed or met a HEAD would carry its state on.
        self._parser = httptools.HttpResponseParser(self)
        self._headers = []
        self.trailers = []
        self._head_bytes = 0
        self._in_head = True
        self._close_delimited = False
        self._reusable = False

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        receiver.on_end()
        self.resume()  # a slow client holds up its own response, not the next one on this connection
        if self._reusable and self.is_open:
            self._on_idle(self)
        else:
            self.close()

    def _fail(self, failure: Failure, message: str) -> None:
        receiver, self._receiver = self._receiver, None
        if self._transport is not None:
            self._transport.abort()
        if receiver is not None:
            receiver.on_failure(UpstreamError(failure, message, reused=self._exchanges > 1))


class ConnectionPool:
    """The connections to one pod. Idle ones are reused last in, first out, so that those beyond the need grow old and end."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: for a server whose name in its certificate is the address's host."""
        self.address = address
        self._tls = tls
        self._idle: deque[UpstreamConnection] = deque()
        self._open: dict[UpstreamConnection, None] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def take_idle(self) -> UpstreamConnection | None:
        """Return an idle connection, or None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a new connection.

        Raises:
            UpstreamError: The pod refused it, is unreachable, or did not accept within ``CONNECT_TIMEOUT_SECONDS``.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self._release, self._forget), *self.address, ssl=self._tls
                )
        except TimeoutError:
            message = f"no connection within {CONNECT_TIMEOUT_SECONDS:g} s"
            raise UpstreamError(Failure.CONNECT, message) from None
        except OSError as error:  # ssl.SSLError is one, too
            raise UpstreamError(Failure.CONNECT, error.strerror or str(error)) from None
        self._open[connection] = None
        return connection

    def close_idle(self) -> None:
        """Close the idle connections: the pod drains, or is gone."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Close the idle connections, and each other one behind its exchange."""
        self._closed = True
        self.close_idle()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _release(self, connection: UpstreamConnection) -> None:
        if self._closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_SECONDS, self._close_old)

    def _forget(self, connection: UpstreamConnection) -> None:
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_old(self) -> None:
        """Close connections that were idle for ``IDLE_SECONDS``; the oldest are at the left end."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().close()
        self._sweep = None
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + IDLE_SECONDS, self._close_old)
