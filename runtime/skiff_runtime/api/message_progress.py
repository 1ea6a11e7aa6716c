"""Progress of the request that arrives on a connection: followed by the parser's events alone, and limited in size.

Bytes are counted by the piece that the connection delivers, for the parser reports neither where a head begins nor what lies
between the chunks of a body.
"""

from typing import Final

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.framing import MalformedRequest

MAX_HEAD_BYTES: Final = 1 << 16
FRAMING_BYTES_PER_BYTE: Final = 16
"""Chunk sizes and extensions that a byte of a body may cost; beyond, a body's framing may be as large as a head."""
_SEPARATORS_BYTES: Final = 4


class MessageProgress:
    """The message that the parser is in, or between two."""

    __slots__ = (
        "_framing_bytes",
        "_piece_bytes",
        "_within_body",
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
        """Of an incomplete head, and of blank lines before it."""
        self._piece_bytes = 0
        self._framing_bytes = 0
        self._within_body = False

    def begin_piece(self, size: int) -> None:
        """Note that ``size`` bytes go to the parser now."""
        self._piece_bytes = size
        self._within_body = self.in_body
        self.ended = False

    def begin(self) -> None:
        """Note the first byte of a request line."""
        self.in_head = True

    def end_head(self) -> None:
        """Note the end of a head that is accepted."""
        self.in_head, self.in_body = False, True
        self.head_bytes = self._framing_bytes = 0

    def end(self) -> None:
        """Note the end of a body, and so of the message."""
        self.in_body, self.ended = False, True

    def count_head(self) -> None:
        """Count this piece to a head that is incomplete at its end. Raises ``MalformedRequest``."""
        self.head_bytes += 1 if self.ended else self._piece_bytes  # it began somewhere in the piece
        if self.head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def check_head(self, target: bytes, headers: Headers) -> None:
        """Check the size of a complete head. Raises ``MalformedRequest``."""
        if self.head_bytes or self._piece_bytes > MAX_HEAD_BYTES:
            size = len(target) + sum(len(name) + len(value) + _SEPARATORS_BYTES for name, value in headers)
            if size > MAX_HEAD_BYTES:
                raise _head_too_large()

    def count_body(self, body_bytes: int) -> None:
        """Count a piece that brought ``body_bytes`` of a body which goes on. Raises ``MalformedRequest``."""
        if self._within_body and not self.ended:
            excess = self._piece_bytes - body_bytes * (1 + FRAMING_BYTES_PER_BYTE)
            self._framing_bytes = max(0, self._framing_bytes + excess)
            if self._framing_bytes > MAX_HEAD_BYTES:
                raise MalformedRequest("the body has too many chunk extensions or trailers")


def _head_too_large() -> MalformedRequest:
    return MalformedRequest(f"the request's head exceeds {MAX_HEAD_BYTES} bytes", 431)
