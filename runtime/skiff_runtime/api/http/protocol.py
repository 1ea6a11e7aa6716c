"""uvicorn's HTTP/1.1 protocol with limits, and with one reply for each request whatever bytes a client sends.

What uvicorn does not document, its protocol class and its request/response cycle, comes from ``uvicorn_internals``.
"""

import asyncio
from typing import Any, Final

import httptools
import uvicorn

from skiff_runtime.api.body_parser import body_parser, make_parser
from skiff_runtime.api.error_replies import render_error_response
from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.framing import MalformedRequest, check_head
from skiff_runtime.api.http.lingering_close import LingeringClose
from skiff_runtime.api.http.middleware import AccessMiddleware
from skiff_runtime.api.http.request_body import REQUEST_ID_HEADER, request_id
from skiff_runtime.api.http.response_cycle import CycleTransport, adapt
from skiff_runtime.api.http.uvicorn_internals import HttpToolsProtocol, RequestResponseCycle
from skiff_runtime.api.message_progress import MessageProgress
from skiff_runtime.errors import RequestError, Unavailable

HEAD_TIMEOUT_SECONDS: Final = 20.0
MAX_PIPELINED_REQUESTS: Final = 64
"""Requests that may wait behind the one being served; the connection ends behind the last of them."""
EXTRA_PROBE_CONNECTIONS: Final = 64
"""Connections beyond the limit that are still accepted, for probes; any other request on them is refused."""


class HttpServerConfig(uvicorn.Config):
    """uvicorn's settings and ours."""

    def __init__(self, gate: AccessMiddleware, *, max_connections: int, **settings: Any) -> None:
        super().__init__(gate, http=HttpProtocol, **settings)
        self.gate = gate
        self.max_connections = max_connections


class _Surplus(Exception):
    """A request came on a connection that ends behind an earlier one."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. Each byte belongs to the request to which the parser counts it, and none is changed.

    The clock of a head runs from the connection's first moment, or from the first byte behind a served request,
    until the head is complete: a request that comes in one piece never starts a timer. A connection is kept alive
    only if a request's body is complete when its reply begins. Otherwise the reply says ``Connection: close``, nothing behind it
    is parsed, and the connection lingers.
    """

    config: HttpServerConfig

    def __init__(self, config: HttpServerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.parser = make_parser(self)
        self._progress = MessageProgress()
        self._head_timer: asyncio.TimerHandle | None = None
        self._deaf = False  # what comes is discarded
        self._keep_alive = False  # once the body is complete that arrives
        self._serving: RequestResponseCycle | None = None
        self._refusal = b""  # sent behind the replies to earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept, accept for probes only, or refuse."""
        super().connection_made(transport)
        self._linger = LingeringClose(transport, self.loop)
        self._cycle_transport = CycleTransport(transport.write, self.close_lingering, self.is_closing)
        beyond = len(self.connections) - self.config.max_connections
        if beyond > EXTRA_PROBE_CONNECTIONS:
            self._deaf = True
            transport.write(self._render(Unavailable("too many connections are open; retry shortly")))
            transport.close()  # without lingering: file descriptors are what is scarce
            return
        if beyond > 0:
            self.app = self.config.gate.handle_over_limit
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._linger.stop()
        self._abandon(self._serving)  # uvicorn informs the newest request alone
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; watch the time and the size of a head, and the framing of a body."""
        if self._deaf:
            self._linger.discard(len(data))
            return
        self._unset_keepalive_if_required()
        progress = self._progress
        progress.begin_piece(len(data))
        held_bytes = len(self.cycle.body) if progress.in_body else 0
        try:
            self._feed(data)
            if self._deaf:
                return
            if progress.in_head or not (progress.in_body or progress.ended):
                progress.count_head()
                if self._serving is None and self._head_timer is None:
                    self._start_timer()
            elif progress.in_body:
                progress.count_body(len(self.cycle.body) - held_bytes)
        except RequestError as error:
            self._refuse(error)

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse. Where a request offers another protocol, read on with a parser that knows nothing of the offer."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = memoryview(data)[offer.args[0] :]
            except httptools.HttpParserError as error:
                self._stop_parsing(error)
                return
            self.parser, announcement = body_parser(self, self._own_headers())
            self.parser.feed_data(announcement)

    def _stop_parsing(self, error: httptools.HttpParserError) -> None:
        """Raise ``RequestError`` for what the parser, or a check at one of its events, found wrong."""
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if isinstance(cause, _Surplus):
            self._deaf = True
        elif isinstance(cause, httptools.HttpParserError):
            raise MalformedRequest(f"this is no valid HTTP/1.1 request: {cause}")
        else:
            raise cause or error

    # Called by the parser.

    def on_message_begin(self) -> None:
        cycle = self.cycle
        if cycle is not None and (not cycle.keep_alive or len(self.pipeline) >= MAX_PIPELINED_REQUESTS):
            cycle.keep_alive = False
            raise _Surplus
        super().on_message_begin()
        self._progress.begin()

    def on_headers_complete(self) -> None:
        self._progress.check_head(self.url, self.headers)
        method, version = self.parser.get_method().decode("ascii"), self.parser.get_http_version()
        self.url = check_head(method, version, self.url, self.headers)
        if self._head_timer is not None:
            self._stop_timers()
        self._progress.end_head()
        super().on_headers_complete()
        self.headers = []  # for trailers, which are not headers
        cycle = self.cycle
        if not self.pipeline:
            self._serving = cycle
        self._keep_alive, cycle.keep_alive = cycle.keep_alive, False
        adapt(cycle, self._cycle_transport)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body is still to come
        self._progress.end()
        cycle = self.cycle
        if not cycle.response_started:
            cycle.keep_alive = self._keep_alive and self.parser.should_keep_alive()
        super().on_message_complete()

    # Called by replies, timers and the server.

    def on_response_complete(self) -> None:
        if self._linger.begun:
            return
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._serving = following
        if following is not None:
            return
        if self._refusal:
            self._send_refusal()
        elif self._progress.head_bytes:
            self._stop_timers()
            self._start_timer()

    def shutdown(self) -> None:
        """End the connection: at once, or behind the replies to what was asked already."""
        self._keep_alive = False
        if self._serving is None:
            self.transport.close()
        else:
            super().shutdown()

    def is_closing(self) -> bool:
        """Return True where nothing more can be written."""
        return self._linger.begun or self.transport.is_closing()

    def close_lingering(self) -> None:
        """End the connection behind what is written already; whatever else the client sends is discarded."""
        self._deaf = True
        self._stop_timers()
        self._abandon(self._serving)
        self._serving = None
        self.pipeline.clear()
        self.flow.resume_reading()
        self._linger.begin()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._late)

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        """Refuse a head that began; just end a connection on which nothing was ever asked."""
        if self._progress.head_bytes:
            self._refuse(MalformedRequest("the request's head did not arrive in time", 408))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Answer the message that is being parsed, behind the replies to those before it, and close."""
        self._deaf = True
        self._stop_timers()
        refusal = self._render(error)
        if self._progress.in_body and self._serving is not self.cycle:
            self.pipeline.popleft()
        elif self._progress.in_body:
            if self.cycle.response_started:
                return  # that reply closes the connection
            self._abandon(self.cycle)
            self._serving = None
        self._refusal = refusal
        self.config.gate.on_refused(error.status)
        if self._serving is None:
            self._send_refusal()

    def _send_refusal(self) -> None:
        self.transport.write(self._refusal)
        self.close_lingering()

    def _abandon(self, cycle: RequestResponseCycle | None) -> None:
        """Let an application know that its client has left."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _own_headers(self) -> Headers:
        """The headers of the message that is being parsed."""
        known = self._progress.in_head or self._progress.in_body
        return self.scope["headers"] if known else []  # type: ignore[return-value]

    def _render(self, error: RequestError) -> bytes:
        """A whole reply to the message that is being parsed."""
        own = [(REQUEST_ID_HEADER, request_id(self._own_headers()).encode())]
        if self._progress.in_body:
            method = self.scope["method"]
        else:
            known = self._progress.in_head and self.url
            method = self.parser.get_method().decode("ascii") if known else ""
        return render_error_response(error, own, with_body=method != "HEAD")
