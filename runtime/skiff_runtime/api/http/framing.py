"""Checks of a request's head: a message that two HTTP implementations might frame or route differently is refused.

The parser (llhttp) refuses most of them itself: two lengths, a length beside chunks, folded lines, bare line feeds,
blanks before a colon. These are the rest, by RFC 9112.
"""

import re
from typing import Final

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.errors import InvalidRequest

VERSIONS: Final = ("1.1", "1.0")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?@]+)(.*)", re.IGNORECASE)
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_FRAMING: Final = (b"content-length", b"transfer-encoding")


class MalformedRequest(InvalidRequest):
    """A message that is no valid HTTP/1.1, or asks of HTTP what is not served."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_head(method: str, version: str, target: bytes, headers: Headers) -> bytes:
    """Return the target as a path with its query; header names are in lower case. Raises ``MalformedRequest``."""
    if version not in VERSIONS:
        raise MalformedRequest("only HTTP/1.1 and HTTP/1.0 are served", 505)
    if method == "CONNECT":
        raise MalformedRequest("this is no proxy: the method CONNECT is not served")
    host: bytes | None = None
    for name, value in headers:
        if name == b"host":
            if host is not None:
                raise MalformedRequest("the request has more than one Host header")
            host = value
        elif name == b"transfer-encoding":
            _check_transfer_encoding(value, version)
        elif name == b"expect" and version == "1.1" and value.lower() != b"100-continue":
            raise MalformedRequest("the only expectation that can be met is 100-continue", 417)
    if host is None and version == "1.1":
        raise MalformedRequest("the request has no Host header")
    if host is not None and not _HOST.fullmatch(host):
        raise MalformedRequest("the Host header is not a host and a port")
    return target if target.startswith(b"/") and b"#" not in target else _path(target, host)


def _check_transfer_encoding(value: bytes, version: str) -> None:
    """Refuse whatever is not the plain word: the parser takes `gzip, chunked`, whose content stays encoded."""
    if version == "1.0":
        raise MalformedRequest("HTTP/1.0 knows no Transfer-Encoding")
    if value.strip(b" \t").lower() != b"chunked":
        raise MalformedRequest("the only Transfer-Encoding served is chunked")


def _path(target: bytes, host: bytes | None) -> bytes:
    """The path of an absolute URL, which must name the same host as the header."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or b"#" in target:
        raise MalformedRequest("the request's target is neither a path nor a URL")
    authority, path = absolute.groups()
    if host is not None and authority.lower() != host.lower():
        raise MalformedRequest("the request's target and its Host header name different hosts")
    return path if path.startswith(b"/") else b"/" + path


def render_framing_head(headers: Headers) -> bytes:
    """A head for a parser of ours that shall read the body which ``headers`` announce, and nothing else of them."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING]
    return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines)
