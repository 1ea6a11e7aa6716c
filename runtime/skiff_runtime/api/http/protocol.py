"""The HTTP/1.1 protocol: uvicorn's, with limits, and with exactly one response for each request.

``uvicorn_internals`` holds the undocumented parts of uvicorn: its protocol class and its request/response cycle.
"""

import asyncio
from typing import Any, Final

import httptools
import uvicorn

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.framing import (
    MalformedRequest,
    MessageProgress,
    check_head,
    make_body_parser,
    make_parser,
)
from skiff_runtime.api.http.lingering_close import LingeringClose
from skiff_runtime.api.http.middleware import AccessMiddleware
from skiff_runtime.api.http.request_headers import REQUEST_ID_HEADER, choose_request_id
from skiff_runtime.api.http.response_cycle import (
    CycleTransport,
    adapt_cycle,
    notify_disconnect,
    release_cycle,
)
from skiff_runtime.api.http.responses import render_error_response
from skiff_runtime.api.http.uvicorn_internals import HttpToolsProtocol, RequestResponseCycle
from skiff_runtime.errors import RequestError, Unavailable

HEAD_TIMEOUT_SECONDS: Final = 20.0
MAX_PIPELINED_REQUESTS: Final = 64
"""Limit on the requests that wait behind the one being served; the connection ends behind the last of them."""
READ_AHEAD_REQUESTS: Final = 4
"""Pipelined requests behind which the connection is still read. Each may take the memory of a head and some of a body."""
EXTRA_PROBE_CONNECTIONS: Final = 64
"""Connections beyond the limit that are still accepted for probes; any other request on them is rejected."""


class HttpServerConfig(uvicorn.Config):
    """uvicorn's settings and the limit on connections. While `closing`, each response ends its connection."""

    def __init__(self, middleware: AccessMiddleware, *, max_connections: int, **settings: Any) -> None:
        super().__init__(middleware, http=HttpProtocol, **settings)
        self.middleware = middleware
        self.max_connections = max_connections
        self.closing = False


class _RequestAfterClose(Exception):
    """A request arrived on a connection that ends behind an earlier one."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. Each byte belongs to the request to which the parser assigns it.

    The timeout of a head runs from the start of the connection, or from the first byte behind a served request, until
    the head is complete. So a request that arrives in one piece starts no timer. A connection is kept alive only if a
    request's body is complete when its response begins. Otherwise the response says ``Connection: close``, nothing
    behind it is parsed, and the connection lingers (``LingeringClose``).
    """

    config: HttpServerConfig

    def __init__(self, config: HttpServerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.parser = make_parser(self)
        self._progress = MessageProgress()
        self._head_timer: asyncio.TimerHandle | None = None
        self._discarding = False  # nothing more is parsed
        self._keep_alive = False  # as the current head asks; granted when its body is complete
        self._serving: RequestResponseCycle | None = None
        self._rejection = b""  # an error response, sent behind the responses to earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, accept it for probes only, or reject it."""
        super().connection_made(transport)
        self._linger = LingeringClose(transport, self.loop)
        self._cycle_transport = CycleTransport(transport.write, self.close_lingering, self.is_closing)
        beyond = len(self.connections) - self.config.max_connections
        if beyond > EXTRA_PROBE_CONNECTIONS:
            self._discarding = True
            transport.write(self._render(Unavailable("too many connections are open; retry shortly")))
            transport.close()  # without lingering, because file descriptors are scarce here
            return
        if beyond > 0:
            self.app = self.config.middleware.handle_over_limit
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._linger.stop()
        self._notify_disconnect(self._serving)  # uvicorn does this for the newest request only
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes within the limits on a head's time and size and on a body's framing."""
        if self._discarding:
            self._linger.discard(len(data))
            return
        self._unset_keepalive_if_required()
        progress = self._progress
        progress.begin_piece(len(data))
        body_bytes = len(self.cycle.body) if progress.in_body else 0
        try:
            self._feed(data)
            if self._discarding:
                return
            if progress.in_head or not (progress.in_body or progress.ended):
                progress.count_head()
                if self._serving is None and self._head_timer is None:
                    self._start_timer()
            elif progress.in_body:
                progress.count_body(len(self.cycle.body) - body_bytes)
        except RequestError as error:
            self._reject(error)

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse ``data``. Continue past an offer to upgrade the protocol, which is ignored, with a new parser."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._stop_parsing(error)
                return
            self.parser, head = make_body_parser(self, self._current_headers())
            self.parser.feed_data(head)

    def _stop_parsing(self, error: httptools.HttpParserError) -> None:
        """Raise ``RequestError`` for an error of the parser, or of a check in one of its callbacks."""
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if isinstance(cause, _RequestAfterClose):
            self._discarding = True
        elif isinstance(cause, httptools.HttpParserError):
            raise MalformedRequest(f"the request is not valid HTTP/1.1: {cause}")
        else:
            raise cause or error

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        cycle = self.cycle
        if cycle is not None and (not cycle.keep_alive or len(self.pipeline) >= MAX_PIPELINED_REQUESTS):
            cycle.keep_alive = False
            raise _RequestAfterClose
        super().on_message_begin()
        self._progress.begin_head()

    def on_headers_complete(self) -> None:
        self._progress.check_head_size(self.url, self.headers)
        method, version = self.parser.get_method().decode("ascii"), self.parser.get_http_version()
        self.url = check_head(method, version, self.url, self.headers)
        if self._head_timer is not None:
            self._stop_timers()
        self._progress.end_head()
        super().on_headers_complete()
        self.headers = []  # trailers are collected here, and must not count as headers
        cycle = self.cycle
        if not self.pipeline:
            self._serving = cycle
        elif len(self.pipeline) <= READ_AHEAD_REQUESTS:
            # uvicorn stops to read behind a pipelined request, and would not notice that the client disconnects.
            self.flow.resume_reading()
        self._keep_alive, cycle.keep_alive = cycle.keep_alive, False
        adapt_cycle(cycle, self._cycle_transport)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # an ignored upgrade: the body has yet to be parsed
        self._progress.end_body()
        cycle = self.cycle
        if not cycle.response_started:
            keep_alive = self._keep_alive and not self.config.closing
            cycle.keep_alive = keep_alive and self.parser.should_keep_alive()
        super().on_message_complete()

    # Callbacks of responses, timers and the server.

    def on_response_complete(self) -> None:
        if self._serving is not None:
            release_cycle(self._serving, self._cycle_transport)
        if self._linger.begun:
            return
        following = self.pipeline[-1][0] if self.pipeline else None  # uvicorn adds at the left end
        super().on_response_complete()
        self._serving = following
        if following is not None:
            return
        if self._rejection:
            self._send_rejection()
        elif self._progress.head_bytes:
            self._stop_timers()
            self._start_timer()

    def end_after_response(self) -> None:
        """End the connection behind the response to the newest request, unless that has begun."""
        if self._serving is not None and not self.cycle.response_started:
            self._keep_alive = self.cycle.keep_alive = False

    def close_when_idle(self) -> None:
        """Close the connection: between two requests at once, otherwise behind the responses to those that have arrived.

        A stream that had begun before could not announce the end, and its client would send the next request here. A new
        connection, whose first request is on the way, is left open.
        """
        if self._serving is not None:
            super().shutdown()
        elif self.cycle is not None and not self._progress.head_bytes and not self._linger.begun:
            self.transport.close()

    def shutdown(self) -> None:
        """End the connection: at once, or behind the responses to the requests that have arrived."""
        self._keep_alive = False
        if self._serving is None:
            self.transport.close()
        else:
            super().shutdown()

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self._linger.begun or self.transport.is_closing()

    def close_lingering(self) -> None:
        """End the connection behind what is written already, and discard what the client still sends."""
        self._discarding = True
        self._stop_timers()
        self._notify_disconnect(self._serving)
        self._serving = None
        self.pipeline.clear()
        self.flow.resume_reading()
        self._linger.begin()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._expire_head)

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire_head(self) -> None:
        """Reject a head that has begun; close a connection that never sent a byte without a response."""
        if self._progress.head_bytes:
            self._reject(MalformedRequest("the request's head did not arrive in time", 408))
        else:
            self.transport.close()

    def _reject(self, error: RequestError) -> None:
        """Respond to the message being parsed, behind the responses to those before it, and close."""
        self._discarding = True
        self._stop_timers()
        rejection = self._render(error)
        if self._progress.in_body and self._serving is not self.cycle:
            self.pipeline.popleft()
        elif self._progress.in_body:
            if self.cycle.response_started:
                return  # that response closes the connection
            self._notify_disconnect(self.cycle)
            self._serving = None
        self._rejection = rejection
        self.config.middleware.on_rejected(error.status)
        if self._serving is None:
            self._send_rejection()

    def _send_rejection(self) -> None:
        self.transport.write(self._rejection)
        self.close_lingering()

    def _notify_disconnect(self, cycle: RequestResponseCycle | None) -> None:
        """Signal an application that its client has disconnected."""
        if cycle is not None and not cycle.response_complete:
            notify_disconnect(cycle)

    def _current_headers(self) -> Headers:
        """Return the headers of the message being parsed; none if its head is incomplete."""
        known = self._progress.in_head or self._progress.in_body
        return self.scope["headers"] if known else []  # type: ignore[return-value]

    def _render(self, error: RequestError) -> bytes:
        """Return an error as a whole response to the message being parsed."""
        headers = [(REQUEST_ID_HEADER, choose_request_id(self._current_headers()).encode())]
        if self._progress.in_body:
            method = self.scope["method"]
        else:
            known = self._progress.in_head and self.url
            method = self.parser.get_method().decode("ascii") if known else ""
        return render_error_response(error, headers, with_body=method != "HEAD")
