"""How much structure a JSON body may have, counted while it arrives.

A validator's time and memory go by the number of values, not of bytes: eight megabytes of ``{},{},`` would hold
up every stream for seconds, eight megabytes of text take milliseconds. So a large body is counted piece by piece,
with a few passes of C over each, and refused as soon as it is too much.
"""

from typing import Final

from skiff_runtime.errors import BodyTooLarge

MAX_PARTS: Final = 1 << 14
"""Strings, objects and arrays: keys count, too. A validator takes one to six microseconds for each."""
MIN_VALUE_LIMIT: Final = 1 << 18
"""Values of any kind; token ids, of which there may be as many as a context holds, are the cheap ones."""


class JsonStructureLimit:
    """Counts of one body. Exact for valid JSON; what is not valid is refused by the parser soon enough."""

    __slots__ = ("_held", "_inside", "_max_values", "_parts", "_quotes", "_values")

    def __init__(self, max_values: int) -> None:
        self._max_values = max(max_values, MIN_VALUE_LIMIT)
        self._held = b""
        self._inside = 0
        self._quotes = 0
        self._parts = 0
        self._values = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece. Raises ``BodyTooLarge``."""
        text = self._without_escapes(piece)
        quotes = text.count(b'"')
        self._quotes += quotes
        self._check()
        outside = b"".join(text.split(b'"')[self._inside :: 2])
        self._inside = (self._inside + quotes) % 2
        self._parts += outside.count(b"{") + outside.count(b"[")
        self._values += outside.count(b",") + outside.count(b":")
        self._check()

    def _without_escapes(self, piece: bytes) -> bytes:
        """The text without escaped backslashes and quotes; half of a pair at its end waits for the next piece."""
        text = self._held + piece
        split = (len(text) - len(text.rstrip(b"\\"))) % 2
        self._held = text[len(text) - split :]
        return text[: len(text) - split].replace(b"\\\\", b"").replace(b'\\"', b"")

    def _check(self) -> None:
        if self._quotes // 2 + self._parts > MAX_PARTS:
            raise BodyTooLarge(
                f"the request body has more than {MAX_PARTS} strings, objects and arrays; send less at a time"
            )
        if self._values > self._max_values:
            raise BodyTooLarge(
                f"the request body has more than {self._max_values} values; send less at a time"
            )
