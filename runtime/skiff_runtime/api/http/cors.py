"""Pages of other origins: what they may read, and what they may not make a server do.

A browser keeps responses from pages that were not told they may read them, but it sends what they post. Where no key
stands in the way, a page anywhere could so have the server of whoever reads it generate, abort or flush.
"""

import re
from typing import Final

from skiff_runtime.api.http.asgi import Headers, Send
from skiff_runtime.api.http.request_body import REQUEST_ID_HEADER, TIMEOUT_HEADER, Scope, get_header
from skiff_runtime.api.http.responses import reply
from skiff_runtime.errors import OriginRefused

PREFLIGHT_MAX_AGE_SECONDS: Final = 600
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")
_EXPOSED: Final = b"x-request-id, retry-after"
_HARMLESS: Final = ("GET", "HEAD", "OPTIONS")


class CorsPolicy:
    """The origins that ``--allowed-origins`` names; ``*`` is all."""

    def __init__(self, named: tuple[str, ...]) -> None:
        self._named = frozenset(origin.encode() for origin in named)

    def headers(self, asked: Headers) -> Headers:
        """What lets the asking page read the response, if it may; nothing where no origin is named."""
        if not self._named:
            return []
        vary = (b"vary", b"origin")
        origin = get_header(asked, b"origin")
        if not origin or not self._names(origin):
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    def is_preflight(self, scope: Scope) -> bool:
        """Whether a browser asks what a page may send, and origins are named."""
        if not self._named or scope["method"] != "OPTIONS":
            return False
        return bool(get_header(scope["headers"], b"access-control-request-method"))

    async def answer_preflight(self, scope: Scope, send: Send, own: Headers) -> None:
        """Without the allowed origin among the headers the answer is: nothing."""
        asked = get_header(scope["headers"], b"access-control-request-headers")
        default = b"authorization, content-type, " + REQUEST_ID_HEADER + b", " + TIMEOUT_HEADER
        own += [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else default),
            (b"access-control-max-age", str(PREFLIGHT_MAX_AGE_SECONDS).encode()),
        ]
        await reply(scope, send, 200, b"")

    def check(self, scope: Scope) -> None:
        """Raise ``OriginRefused`` for what a page that is neither the server's own nor of a named origin wants done."""
        if scope["method"] in _HARMLESS:
            return
        origin = get_header(scope["headers"], b"origin")
        if (
            not origin
            or self._names(origin)
            or _host_of(origin) == get_header(scope["headers"], b"host").lower()
        ):
            return
        raise OriginRefused(
            f"pages of {origin[:256].decode('latin-1')!r} may not use this service: start it with that origin as "
            "--allowed-origins, or with --api-key"
        )

    def _names(self, origin: bytes) -> bool:
        return origin in self._named or b"*" in self._named


def _host_of(origin: bytes) -> bytes:
    """``host[:port]``, as the Host header has it; proxies may have taken TLS away, so the scheme says nothing."""
    return origin.rpartition(b"://")[2].lower()
