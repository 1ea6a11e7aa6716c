"""A strict reader of HTTP/1.1 responses: h11's client parser, which rejects framing that violates RFC 9112.

The server and the other test clients use another implementation (httptools), so a bug in one does not hide the same bug
in the other.
"""

import socket
from dataclasses import dataclass, field
from typing import Final

import h11

MAX_INCOMPLETE_BYTES: Final = 1 << 18
READ_BYTES: Final = 1 << 16


class Malformed(Exception):
    """The server sent bytes that are no response to the request, or an incomplete response."""


@dataclass(frozen=True, slots=True)
class StrictReply:
    """One whole final response. ``interim`` counts the 100 Continue before it."""

    status: int
    headers: dict[str, str]
    body: bytes
    interim: int = 0
    http_version: str = "1.1"


@dataclass
class ReplyStream:
    """Divides the bytes that a server sends on one connection into responses to requests with ``methods``."""

    methods: tuple[str, ...]
    replies: list[StrictReply] = field(default_factory=list)
    pending: bytes = b""

    def __post_init__(self) -> None:
        self._connection: h11.Connection | None = None
        self._expected = list(self.methods)
        self._interim = 0
        self._response: h11.Response | None = None
        self._body = bytearray()

    @property
    def interim(self) -> int:
        """Number of interim responses before the response that is due."""
        return self._interim if self._connection is not None else 0

    def feed(self, data: bytes) -> None:
        """Parse received bytes, b"" for the connection's end. Raises ``Malformed``."""
        self.pending += data
        while self.pending or not data:
            if self._connection is None:
                if not self.pending:
                    return
                self._begin()
            assert self._connection is not None
            given, self.pending = self.pending, b""
            try:
                if given:
                    self._connection.receive_data(given)
                if not data:
                    self._connection.receive_data(b"")
                ended = self._handle_events()
            except h11.ProtocolError as error:
                raise Malformed(f"{error}: {given[:200]!r}") from None
            if not ended:
                if not data:
                    raise Malformed(f"the connection ended within a response: {given[:200]!r}")
                return

    def _begin(self) -> None:
        """Start to parse the response to the next request."""
        if not self._expected:
            raise Malformed(f"bytes without a request: {self.pending[:200]!r}")
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_INCOMPLETE_BYTES)
        method = self._expected.pop(0)
        self._connection.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._connection.send(h11.EndOfMessage())
        self._interim, self._response, self._body = 0, None, bytearray()

    def _handle_events(self) -> bool:
        """Handle the parser's events. Returns True once the response is complete."""
        assert self._connection is not None
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.InformationalResponse):
                self._interim += 1
            elif isinstance(event, h11.Response):
                self._response = event
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._end()
                return True
            elif isinstance(event, h11.ConnectionClosed):
                return False
            else:
                return False

    def _end(self) -> None:
        assert self._connection is not None and self._response is not None
        headers: dict[str, str] = {}
        for name, value in self._response.headers:
            key = name.decode()
            if key in headers:
                raise Malformed(f"the header {key} came twice")
            headers[key] = value.decode("latin-1")
        version = self._response.http_version.decode()
        reply = StrictReply(self._response.status_code, headers, bytes(self._body), self._interim, version)
        self.replies.append(reply)
        self.pending = self._connection.trailing_data[0] + self.pending
        self._connection = None


def read_replies(connection: socket.socket, methods: tuple[str, ...]) -> list[StrictReply]:
    """Return every response up to the connection's end, one for each of ``methods`` at most. Raises ``Malformed``."""
    stream = ReplyStream(methods)
    while data := connection.recv(READ_BYTES):
        stream.feed(data)
    stream.feed(b"")
    return stream.replies


def read_reply(connection: socket.socket, method: str) -> StrictReply:
    """Return one response. Raises ``Malformed``, also if bytes follow it."""
    stream = ReplyStream((method,))
    while not stream.replies:
        data = connection.recv(READ_BYTES)
        stream.feed(data)
        if not data and not stream.replies:
            raise Malformed("the connection ended before the response")
    if stream.pending:
        raise Malformed(f"bytes behind the response: {stream.pending[:200]!r}")
    return stream.replies[0]
