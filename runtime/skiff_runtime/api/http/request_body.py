"""Reading of request bodies within limits of size, time and JSON structure."""

import asyncio
from typing import Final

from skiff_runtime.api.http.asgi import BODY_EXTENSION, Receive, Scope, TakeBody
from skiff_runtime.errors import BodyTooLarge, BodyTooSlow

BODY_TIMEOUT_SECONDS: Final = 60.0
UNCOUNTED_BODY_BYTES: Final = 1 << 14
"""The structure of a body that arrives in one piece of at most this size is not counted: it cannot hold much."""
SLICE_BYTES: Final = 1 << 16
MAX_NODES: Final = 1 << 14
"""Strings (keys included), objects and arrays. A validator takes one to six microseconds for each."""
MIN_VALUE_LIMIT: Final = 1 << 18
"""Lower bound of the limit on values of any kind. Most are token IDs, which are cheap to validate."""


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


class BodyReader:
    """Reads bodies within limits of size, structure and time."""

    def __init__(
        self, limit_bytes: int, *, max_values: int, timeout_seconds: float = BODY_TIMEOUT_SECONDS
    ) -> None:
        """``max_values``: number of JSON values that a body may always hold, such as the token IDs of a whole context."""
        self._limit_bytes = limit_bytes
        self._max_values = max_values
        self._timeout_seconds = timeout_seconds

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body.

        Most bodies are short and complete when their request starts; those cost neither a message nor a timer.

        Raises:
            BodyTooLarge: The body exceeds a limit; raised before reading if Content-Length is already too large.
            BodyTooSlow: The body did not arrive in time.
            ClientDisconnected: The client left before the end of the body.
        """
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._limit_bytes:
                raise self._too_large()
        take: TakeBody | None = scope.get("extensions", {}).get(BODY_EXTENSION)
        body = take(min(self._limit_bytes, UNCOUNTED_BODY_BYTES)) if take is not None else None
        if body is not None:
            return body
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._read_pieces(receive)
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not arrive within {self._timeout_seconds:g} s") from None

    async def _read_pieces(self, receive: Receive) -> bytes:
        body = bytearray()
        structure = JsonStructureLimit(self._max_values)
        while (message := await receive())["type"] == "http.request":
            piece = message["body"]
            if len(body) + len(piece) > self._limit_bytes:
                raise self._too_large()
            if not body and not message.get("more_body") and len(piece) <= UNCOUNTED_BODY_BYTES:
                return bytes(piece)
            body += piece
            for start in range(0, len(piece), SLICE_BYTES):
                structure.feed(piece[start : start + SLICE_BYTES])
                await asyncio.sleep(0)  # lets other requests' callbacks run between two slices
            if not message.get("more_body"):
                return bytes(body)
        raise ClientDisconnected

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request body exceeds {self._limit_bytes} bytes (--max-request-bytes); send less"
        )


class JsonStructureLimit:
    """Limit on the number of values in a JSON body, counted piece by piece while the body arrives.

    A validator's time and memory depend on the number of values, not of bytes: eight megabytes of ``{},{},`` would
    block every stream for seconds, eight megabytes of text take milliseconds. The count costs a few passes in C over
    each piece. It is exact for valid JSON; the parser rejects anything else.
    """

    __slots__ = ("_in_string", "_max_values", "_nodes", "_pending", "_quotes", "_values")

    def __init__(self, max_values: int) -> None:
        self._max_values = max(max_values, MIN_VALUE_LIMIT)
        self._pending = b""
        self._in_string = 0
        self._quotes = 0
        self._nodes = 0
        self._values = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece. Raises ``BodyTooLarge``."""
        text = self._remove_escapes(piece)
        quotes = text.count(b'"')
        self._quotes += quotes
        self._check()
        # Splitting at the quotes yields text outside and inside of strings in turn.
        outside = b"".join(text.split(b'"')[self._in_string :: 2])
        self._in_string = (self._in_string + quotes) % 2
        self._nodes += outside.count(b"{") + outside.count(b"[")
        self._values += outside.count(b",") + outside.count(b":")
        self._check()

    def _remove_escapes(self, piece: bytes) -> bytes:
        """Return the text without escaped backslashes and quotes; half of a pair at its end waits for the next piece."""
        text = self._pending + piece
        split = (len(text) - len(text.rstrip(b"\\"))) % 2
        self._pending = text[len(text) - split :]
        return text[: len(text) - split].replace(b"\\\\", b"").replace(b'\\"', b"")

    def _check(self) -> None:
        if self._quotes // 2 + self._nodes > MAX_NODES:
            raise BodyTooLarge(
                f"the request body has more than {MAX_NODES} strings, objects and arrays; send fewer at a time"
            )
        if self._values > self._max_values:
            raise BodyTooLarge(
                f"the request body has more than {self._max_values} values; send fewer at a time"
            )
