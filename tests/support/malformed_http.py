"""Messages that are not valid HTTP/1.1 or have ambiguous framing: each must be rejected, and the connection closed."""

from typing import Final

_POST: Final = "POST /v1/completions HTTP/1.1"
_CHUNKED: Final = "transfer-encoding: chunked"
_EMPTY: Final = "\r\n0\r\n\r\n"

BROKEN_HEADS: Final = (
    (400, _POST, "content-length: 5\r\ncontent-length: 5\r\n\r\nhello"),
    (400, _POST, "content-length: 5\r\ncontent-length: 6\r\n\r\nhello"),
    (400, _POST, "content-length: 5,5\r\n\r\nhello"),
    (400, _POST, "content-length: -5\r\n\r\nhello"),
    (400, _POST, "content-length: 0x5\r\n\r\nhello"),
    (400, _POST, "content-length: 99999999999999999999\r\n\r\nhello"),
    (400, _POST, f"content-length: 5\r\n{_CHUNKED}\r\n{_EMPTY}"),
    (400, _POST, f"{_CHUNKED}\r\ncontent-length: 5\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding: xchunked\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding: xchunked\r\nupgrade: h2c\r\nconnection: upgrade\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding: gzip, chunked\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding: chunked, identity\r\n{_EMPTY}"),
    (400, _POST, f"{_CHUNKED}\r\n{_CHUNKED}\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding:\x0bchunked\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding:\r\n chunked\r\n{_EMPTY}"),
    (400, _POST, f"transfer-encoding : chunked\r\n{_EMPTY}"),
    (400, _POST, "x: a\r\n b\r\n\r\n"),
    (400, _POST, "x: a\ny: b\r\n\r\n"),
    (400, _POST, "x: a\ry: b\r\n\r\n"),
    (400, _POST, "x: a\0\r\n\r\n"),
    (400, _POST, ": a\r\n\r\n"),
    (400, _POST, "x\r\n\r\n"),
    (400, _POST, "host: y\r\n\r\n"),
    (417, _POST, "expect: a-miracle\r\ncontent-length: 5\r\n\r\nhello"),
    (400, "POST /v1/completions HTTP/1.0", f"{_CHUNKED}\r\n{_EMPTY}"),
    (431, "GET /livez HTTP/1.1", f"x: {'y' * 70_000}\r\n\r\n"),
    (505, "GET /livez HTTP/2.0", "\r\n"),
    (505, "GET /livez", "\r\n"),
    (400, "GET /livez HTTP/1.2", "\r\n"),
    (400, "GET /li vez HTTP/1.1", "\r\n"),
    (400, "GET /livez#a HTTP/1.1", "\r\n"),
    (400, "GET http://y/livez HTTP/1.1", "\r\n"),
    (400, "OPTIONS * HTTP/1.1", "\r\n"),
    (400, "CONNECT localhost:443 HTTP/1.1", "\r\n"),
    (417, "HEAD /livez HTTP/1.1", "expect: a-miracle\r\n\r\n"),
)
"""(expected status, request line, bytes behind the Host header)"""

BROKEN_CHUNKS: Final = (
    b"10000000000000005\r\nhello\r\n",
    b"+5\r\nhello\r\n",
    b"0x5\r\nhello\r\n",
    b"5 \r\nhello\r\n",
    b"5\nhello\r\n",
    b"5\rhello\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5;a\nhello\r\n",
    b"5;a\x00\r\nhello\r\n",
    b"5;" + b"a" * 700_000 + b"\r\nhello\r\n",
    b"\r\nhello\r\n",
    b"0\r\ncontent-length: 5\r\n\r\n",
    b"0\r\ntransfer-encoding: chunked\r\n\r\n",
    b"0\r\nx : y\r\n\r\n",
    b"0\r\nx: a\r\n b\r\n\r\n",
    b"0\n\n",
    b"0\r\nx: " + b"a" * 700_000 + b"\r\n\r\n",
)
"""Malformed bytes of a chunked body, to be sent behind its head or behind valid chunks."""

GARBAGE: Final = (
    b"\x16\x03\x01\x02\x00\x01",
    b"NONSENSE / HTTP/1.1",
    b"hello",
    b"\x00",
    b"{}",
    b"HTTP/1.1 200 OK",
)
"""Bytes that cannot start a request."""
