"""What an endpoint reads of an HTTP request: its body, within limits, its id, its deadline, its trace."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.structure import JsonStructureLimit
from skiff_runtime.errors import BodyTooLarge, BodyTooSlow, InvalidRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

BODY_TIMEOUT_SECONDS: Final = 60.0
MAX_DEADLINE_SECONDS: Final = 86400
UNCOUNTED_BODY_BYTES: Final = 1 << 14
"""A body that comes in one piece of at most so many bytes is not counted: it cannot hold much."""
SLICE_BYTES: Final = 1 << 16
REQUEST_ID_HEADER: Final = b"x-request-id"
TIMEOUT_HEADER: Final = b"x-request-timeout-seconds"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class ClientDisconnected(Exception):
    """The client left before its request was whole."""


def get_header(headers: Headers, wanted: bytes) -> bytes:
    """The value of the first header of this name, in lower case; "" where there is none."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def request_id(headers: Headers) -> str:
    """The client's X-Request-Id where it is a short plain word, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(12)


def deadline_seconds(headers: Headers, longest: float) -> float:
    """The smaller of the client's X-Request-Timeout-Seconds and ``longest``; 0 for none. Raises ``InvalidRequest``."""
    for name, value in headers:
        if name == TIMEOUT_HEADER:
            try:
                wanted = float(value)
            except ValueError:
                wanted = 0.0
            if not 0 < wanted <= MAX_DEADLINE_SECONDS:
                raise InvalidRequest(
                    f"the header {TIMEOUT_HEADER.decode()} must be a number of seconds above 0 and at most "
                    f"{MAX_DEADLINE_SECONDS}",
                    param=TIMEOUT_HEADER.decode(),
                )
            return min(wanted, longest or wanted)
    return longest


def get_trace_context(headers: Headers) -> dict[str, str]:
    """The W3C trace headers."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in (b"traceparent", b"tracestate")
    }


class BodyReader:
    """Reads bodies within limits of size, structure and time."""

    def __init__(
        self, limit_bytes: int, *, max_values: int, timeout_seconds: float = BODY_TIMEOUT_SECONDS
    ) -> None:
        """``max_values``: how many values a body may hold at least, such as the token ids of a whole context."""
        self._limit_bytes = limit_bytes
        self._max_values = max_values
        self._timeout_seconds = timeout_seconds

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises ``BodyTooLarge``, where it can before reading it, ``BodyTooSlow`` or ``ClientDisconnected``."""
        for name, value in headers:
            if name == b"content-length" and int(value) > self._limit_bytes:
                raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._pieces(receive)
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not arrive within {self._timeout_seconds:g} s") from None

    async def _pieces(self, receive: Receive) -> bytes:
        whole = bytearray()
        structure = JsonStructureLimit(self._max_values)
        while (message := await receive())["type"] == "http.request":
            piece = message["body"]
            if len(whole) + len(piece) > self._limit_bytes:
                raise self._too_large()
            if not whole and not message.get("more_body") and len(piece) <= UNCOUNTED_BODY_BYTES:
                return bytes(piece)
            whole += piece
            for start in range(0, len(piece), SLICE_BYTES):
                structure.feed(piece[start : start + SLICE_BYTES])
                await asyncio.sleep(0)  # others' turn
            if not message.get("more_body"):
                return bytes(whole)
        raise ClientDisconnected

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request body exceeds {self._limit_bytes} bytes (--max-request-bytes); send less"
        )
