"""Undocumented parts of uvicorn: its HTTP/1.1 protocol on httptools, of which the API's protocol is a subclass.

No other module imports from ``uvicorn.protocols``.
"""

from typing import Final

from skiff_runtime.internals import Shape, borrowed

__all__ = ["STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle"]

NEEDED: Final[Shape] = {
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol": (
        # overridden or called
        "connection_made",
        "connection_lost",
        "data_received",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "shutdown",
        "_unset_keepalive_if_required",
        # read or set
        "app",
        "config",
        "connections",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "transport",
    ),
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle": (
        "body",
        "chunked_encoding",
        "default_headers",
        "disconnected",
        "expected_content_length",
        "flow",
        "keep_alive",
        "message_event",
        "more_body",
        "on_response",
        "response_complete",
        "response_started",
        "scope",
        "send",
        "transport",
        "waiting_for_100_continue",
    ),
    "uvicorn.protocols.http.httptools_impl": ("STATUS_LINE",),
    "uvicorn.protocols.http.flow_control:FlowControl": ("resume_reading", "write_paused"),
    "uvicorn:Server": ("capture_signals", "server_state", "should_exit"),
    "uvicorn.server:ServerState": ("connections",),
}

with borrowed("uvicorn", NEEDED):
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
