"""Request framing (RFC 9112): checks of heads, limits on their size, and parsing past an ignored protocol upgrade.

A message that two HTTP implementations might frame or route differently is rejected, because a proxy in front of this
server may be the other one (request smuggling). The parser, llhttp, rejects most of them itself: two lengths, a length
beside chunks, folded lines, bare line feeds, blanks before a colon. ``check_head`` rejects the rest.
"""

import re
from typing import Any, Final

import httptools

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.errors import InvalidRequest

VERSIONS: Final = ("1.1", "1.0")
MAX_HEAD_BYTES: Final = 1 << 16
FRAMING_BYTES_PER_BYTE: Final = 16
"""Chunk sizes and extensions allowed for each byte of a body. The excess over all of it may be as large as a head."""
_SEPARATORS_BYTES: Final = 4
"""Colon, space and line end of one header."""
_ABSOLUTE: Final = re.compile(rb"https?://([^/?@]+)(.*)", re.IGNORECASE)
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")


class MalformedRequest(InvalidRequest):
    """A message that is not valid HTTP/1.1, or that uses a part of HTTP which is not served."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_head(method: str, version: str, target: bytes, headers: Headers) -> bytes:
    """Return the target of a request as a path with its query. Raises ``MalformedRequest``."""
    if version not in VERSIONS:
        raise MalformedRequest("only HTTP/1.1 and HTTP/1.0 are served", 505)
    if method == "CONNECT":
        raise MalformedRequest("this server is not a proxy: the method CONNECT is not served")
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
    return target if target.startswith(b"/") and b"#" not in target else _extract_path(target, host)


def _check_transfer_encoding(value: bytes, version: str) -> None:
    """Reject anything but the plain word: the parser accepts ``gzip, chunked``, and would leave the content compressed."""
    if version == "1.0":
        raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding")
    if value.strip(b" \t").lower() != b"chunked":
        raise MalformedRequest("the only Transfer-Encoding served is chunked")


def _extract_path(target: bytes, host: bytes | None) -> bytes:
    """Return the path of an absolute URL, which must name the same host as the Host header."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or b"#" in target:
        raise MalformedRequest("the request's target is neither a path nor a URL")
    authority, path = absolute.groups()
    if host is not None and authority.lower() != host.lower():
        raise MalformedRequest("the request's target and its Host header name different hosts")
    return path if path.startswith(b"/") else b"/" + path


class MessageProgress:
    """Parsing state of the message that arrives on a connection, and the limits on its size.

    It follows the parser's events. Bytes are counted for whole pieces as the connection delivers them, because the parser
    reports neither the start of a head nor the bytes between the chunks of a body.
    """

    __slots__ = (
        "_began_in_body",
        "_framing_bytes",
        "_piece_bytes",
        "ended",
        "head_bytes",
        "in_body",
        "in_head",
    )

    def __init__(self) -> None:
        self.in_head = False
        self.in_body = False
        self.ended = False
        """A message ended within this piece."""
        self.head_bytes = 0
        """Bytes of an incomplete head, and of blank lines before it."""
        self._piece_bytes = 0
        self._framing_bytes = 0
        self._began_in_body = False

    def begin_piece(self, size: int) -> None:
        """Record that ``size`` bytes are about to be parsed."""
        self._piece_bytes = size
        self._began_in_body = self.in_body
        self.ended = False

    def begin_head(self) -> None:
        """Record the first byte of a request line."""
        self.in_head = True

    def end_head(self) -> None:
        """Record the end of a head that is accepted."""
        self.in_head, self.in_body = False, True
        self.head_bytes = self._framing_bytes = 0

    def end_body(self) -> None:
        """Record the end of a body, and so of the message."""
        self.in_body, self.ended = False, True

    def count_head(self) -> None:
        """Add this piece to a head that is incomplete at the piece's end. Raises ``MalformedRequest``."""
        # After the end of another message within the piece, the head begins at an unknown byte: count the least.
        self.head_bytes += 1 if self.ended else self._piece_bytes
        if self.head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def check_head_size(self, target: bytes, headers: Headers) -> None:
        """Check the size of a complete head. Raises ``MalformedRequest``."""
        if self.head_bytes or self._piece_bytes > MAX_HEAD_BYTES:
            size = len(target) + sum(len(name) + len(value) + _SEPARATORS_BYTES for name, value in headers)
            if size > MAX_HEAD_BYTES:
                raise _head_too_large()

    def count_body(self, body_bytes: int) -> None:
        """Count a piece that holds ``body_bytes`` of an incomplete body, and framing. Raises ``MalformedRequest``."""
        if self._began_in_body and not self.ended:
            excess = self._piece_bytes - body_bytes * (1 + FRAMING_BYTES_PER_BYTE)
            self._framing_bytes = max(0, self._framing_bytes + excess)
            if self._framing_bytes > MAX_HEAD_BYTES:
                raise MalformedRequest("the body has too many chunk extensions or trailers")


def _head_too_large() -> MalformedRequest:
    return MalformedRequest(f"the request's head exceeds {MAX_HEAD_BYTES} bytes", 431)


def make_parser(protocol: Any) -> httptools.HttpRequestParser:
    """Return a parser that calls ``protocol``, and continues behind a request with ``Connection: close``.

    ``protocol`` itself decides about bytes behind such a request; the parser would report them as an error.
    """
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def make_body_parser(protocol: Any, headers: Headers) -> tuple[httptools.HttpRequestParser, bytes]:
    """Return a parser that continues behind a head with an ignored ``Upgrade``, and the bytes to feed to it first.

    A server may ignore an upgrade, and this one does: Java's client offers "h2c" with every first request. httptools
    stops behind such a head and leaves the body to the other protocol. So a new parser is fed a head without the offer,
    whose events are not passed on and which announces the same body, and then the bytes that the client sent.
    """
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING_HEADERS]
    return make_parser(_EventsAfterHead(protocol)), b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines)


class _EventsAfterHead:
    """Passes a parser's events on from the end of its first head."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._passing = False

    def on_message_begin(self) -> None:
        if self._passing:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._passing:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._passing:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._passing:
            self._protocol.on_headers_complete()
        self._passing = True

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self._protocol.on_message_complete()
