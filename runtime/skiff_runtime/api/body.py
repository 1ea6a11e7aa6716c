"""What an endpoint reads of an HTTP request: its body, within limits, and its id."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from skiff_runtime.api.writer import Headers
from skiff_runtime.errors import BodyTooLarge, BodyTooSlow

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

BODY_TIMEOUT_SECONDS: Final = 60.0
REQUEST_ID_HEADER: Final = b"x-request-id"
TIMEOUT_HEADER: Final = b"x-request-timeout-seconds"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class ClientGone(Exception):
    """The client left before its request was whole."""


def request_id(headers: Headers) -> str:
    """The client's X-Request-Id where it is a short plain word, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(12)


async def read_body(
    headers: Headers, receive: Receive, limit_bytes: int, *, timeout_seconds: float = BODY_TIMEOUT_SECONDS
) -> bytes:
    """The whole body. Raises ``BodyTooLarge``, where it can before reading it, ``BodyTooSlow`` or ``ClientGone``."""
    for name, value in headers:
        if name == b"content-length" and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read_pieces(receive, limit_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {timeout_seconds:g} s") from None


async def _read_pieces(receive: Receive, limit_bytes: int) -> bytes:
    pieces = bytearray()
    while (message := await receive())["type"] == "http.request":
        pieces += message["body"]
        if len(pieces) > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body"):
            return bytes(pieces)
    raise ClientGone


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body exceeds {limit_bytes} bytes (--max-request-bytes); send less")
