"""CORS: responses that pages of other origins may read, and requests that they may not send.

A browser withholds a response from a page of another origin unless the response allows it, but it still sends the
page's POST requests. So without API keys, any page that a user opens could make the user's server generate, abort or
flush.
"""

import re
from typing import Final

from skiff_runtime.api.http.asgi import Headers, Scope, Send
from skiff_runtime.api.http.request_headers import REQUEST_ID_HEADER, TIMEOUT_HEADER, get_header
from skiff_runtime.api.http.responses import send_response
from skiff_runtime.errors import OriginRefused

PREFLIGHT_MAX_AGE_SECONDS: Final = 600
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")
_EXPOSED_HEADERS: Final = b"x-request-id, retry-after"
_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")


class CorsPolicy:
    """The origins that ``--allowed-origins`` allows; ``*`` allows all."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def response_headers(self, request_headers: Headers) -> Headers:
        """Return the headers that let an allowed page read the response; none if no origin is configured."""
        if not self._allowed:
            return []
        vary = (b"vary", b"origin")
        origin = get_header(request_headers, b"origin")
        if not origin or not self._allows(origin):
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
        ]

    def is_preflight(self, scope: Scope) -> bool:
        """Return whether a request is a CORS preflight, and origins are configured."""
        if not self._allowed or scope["method"] != "OPTIONS":
            return False
        return bool(get_header(scope["headers"], b"access-control-request-method"))

    async def answer_preflight(self, scope: Scope, send: Send, headers: Headers) -> None:
        """Respond to a preflight. ``headers`` are the response's headers; without an allowed origin they permit nothing."""
        requested = get_header(scope["headers"], b"access-control-request-headers")
        default = b"authorization, content-type, " + REQUEST_ID_HEADER + b", " + TIMEOUT_HEADER
        headers += [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", requested if _HEADER_NAMES.fullmatch(requested) else default),
            (b"access-control-max-age", str(PREFLIGHT_MAX_AGE_SECONDS).encode()),
        ]
        await send_response(scope, send, 200, b"")

    def check_origin(self, scope: Scope) -> None:
        """Raise ``OriginRefused`` for an unsafe method from a page that is neither same-origin nor allowed."""
        if scope["method"] in _SAFE_METHODS:
            return
        origin = get_header(scope["headers"], b"origin")
        if (
            not origin
            or self._allows(origin)
            or _host_of(origin) == get_header(scope["headers"], b"host").lower()
        ):
            return
        raise OriginRefused(
            f"pages of {origin[:256].decode('latin-1')!r} may not use this service: start it with that origin as "
            "--allowed-origins, or with --api-key"
        )

    def _allows(self, origin: bytes) -> bool:
        return origin in self._allowed or b"*" in self._allowed


def _host_of(origin: bytes) -> bytes:
    """Return ``host[:port]`` as in a Host header. The scheme is ignored, because a proxy may have terminated TLS."""
    return origin.rpartition(b"://")[2].lower()
