"""uvicorn's HTTP/1.1 protocol with limits: on open connections, on the time and the size of a request's head."""

import asyncio
import re
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from skiff_runtime.api.body import REQUEST_ID_HEADER, request_id
from skiff_runtime.api.error_replies import error_body, error_headers
from skiff_runtime.api.gate import Gate
from skiff_runtime.api.writer import CHUNKS
from skiff_runtime.errors import InvalidRequest, RequestError, Unavailable

HEAD_TIMEOUT_SECONDS: Final = 20.0
MAX_HEAD_BYTES: Final = 1 << 16
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
PROBE_CONNECTIONS: Final = 64
"""So many beyond the limit are still accepted, for probes; whoever else comes on them is refused."""


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings and ours."""

    def __init__(self, gate: Gate, *, max_connections: int, **settings: Any) -> None:
        super().__init__(gate, http=LimitedProtocol, **settings)
        self.gate = gate
        self.max_connections = max_connections


class ChunkedBody:
    """One response's body, past the ASGI messages that begin and end it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Write ``data``, not empty, as one chunk; False while the connection is full, or where that cannot be."""
        cycle = self._cycle
        if cycle.flow.write_paused or not cycle.chunked_encoding or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class JoinedHead:
    """A connection, as one response sees it, until its body begins: the head goes out with the first piece of the body.

    One system call instead of two, and one wake-up of the client. What is written before the head (100 Continue) is not
    held back.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Keep the head; then write it, and step aside."""
        if not self._cycle.response_started:
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        """Whether the connection is."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Write what was kept, for no body came, and close."""
        if self._head is not None:
            self._transport.write(self._head)
        self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    The head's clock runs from the connection's first moment, or from the first byte after a response,
    until a head is complete: a request that is whole in one piece never starts a timer.
    """

    config: LimitedConfig

    def __init__(self, config: LimitedConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept, accept for probes only, or refuse."""
        super().connection_made(transport)
        beyond = len(self.connections) - self.config.max_connections
        if beyond > PROBE_CONNECTIONS:
            self._refuse(Unavailable("too many connections are open; retry shortly"))
        elif beyond > 0:
            self.app = self.config.gate.when_full
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; watch the clock and the size while a head is incomplete."""
        if self.transport.is_closing():
            return
        if self._awaits_head and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if not self._awaits_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(InvalidRequest(f"the request's head exceeds {MAX_HEAD_BYTES} bytes"), 431)
        elif self._head_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._head_bytes = 0
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            self.cycle.transport = JoinedHead(self.cycle)  # type: ignore[assignment]
        self.scope["extensions"] = {CHUNKS: ChunkedBody(self.cycle).write}  # type: ignore[dict-item]

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all is refused in the API's own shape."""
        self._refuse(InvalidRequest(f"this is no valid HTTP/1.1 request: {msg}"))

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        """A head that began is refused; a connection on which nothing was ever asked just ends."""
        if self._head_bytes:
            self._refuse(InvalidRequest("the request's head did not arrive in time"), 408)
        else:
            self.transport.close()

    def _refuse(self, error: RequestError, status: int | None = None) -> None:
        """Answer without an application, and close."""
        self._stop_timer()
        body = error_body(error)
        head = [
            STATUS_LINE[status or error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            *(b"%s: %s\r\n" % header for header in error_headers(error) if header[0] != b"connection"),
            b"%s: %s\r\n" % (REQUEST_ID_HEADER, request_id(self.headers or []).encode()),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join(head) + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A request's first piece as if it offered no other protocol. For one that does, the parser would skip the body.

    HTTP lets a server ignore the offer; Java's client makes one ("h2c") with every first request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + end + rest
