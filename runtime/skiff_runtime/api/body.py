"""What an endpoint reads of an HTTP request: its body, within limits, and its id."""

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from skiff_runtime.api.writer import Headers
from skiff_runtime.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

REQUEST_ID_HEADER: Final = b"x-request-id"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class ClientGone(Exception):
    """The client left before its request was whole."""


def request_id(headers: Headers) -> str:
    """The client's X-Request-Id where it is a short plain word, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(12)


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises ``BodyTooLarge``, where it can before reading it, or ``ClientGone``."""
    for name, value in headers:
        if name == b"content-length" and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
    message = await receive()
    if not message.get("more_body") and message["type"] == "http.request":
        body: bytes = message["body"]
        return body if len(body) <= limit_bytes else _refuse(limit_bytes)
    return await _read_pieces(message, receive, limit_bytes)


async def _read_pieces(message: MutableMapping[str, Any], receive: Receive, limit_bytes: int) -> bytes:
    pieces = bytearray()
    while message["type"] == "http.request":
        pieces += message["body"]
        if len(pieces) > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body"):
            return bytes(pieces)
        message = await receive()
    raise ClientGone


def _refuse(limit_bytes: int) -> bytes:
    raise _too_large(limit_bytes)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body exceeds {limit_bytes} bytes (--max-request-bytes); send less")
