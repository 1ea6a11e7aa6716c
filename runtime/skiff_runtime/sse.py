"""Server-sent events as OpenAI's API sends them: the encoder of the server, and the decoder of the shell and the benchmarks."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from skiff_runtime.errors import SkiffError

DONE: Final = b"[DONE]"
"""Data of the event that ends a stream."""
DONE_EVENT: Final = b"data: " + DONE + b"\n\n"
MAX_EVENT_BYTES: Final = 4 << 20
_FIELD: Final = b"data:"
_COMMENT: Final = b":"

encode_json: Final = msgspec.json.Encoder().encode


def encode_event(value: Any, name: str = "") -> bytes:
    """Return an event with ``value`` as JSON; ``name`` is its type, "" for none."""
    head = f"event: {name}\ndata: ".encode() if name else b"data: "
    return head + encode_json(value) + b"\n\n"


class EventTemplate:
    """An event in which one JSON value varies. The rest is encoded once, so that a token costs one string and two joins."""

    __slots__ = ("_after", "_before")

    def __init__(self, event: dict[str, Any], placeholder: str, name: str = "") -> None:
        """``event`` contains ``placeholder`` exactly once, as the value to be replaced. ``name``: as of ``encode_event``."""
        before, found, after = encode_event(event, name).partition(encode_json(placeholder))
        assert found and encode_json(placeholder) not in after, placeholder
        self._before = before
        self._after = after

    def fill(self, value: Any) -> bytes:
        """Return the event with ``value`` in the place of the placeholder."""
        return self._before + encode_json(value) + self._after


class EventDecoder:
    """Decodes a stream that arrives in arbitrary parts into the data of its events; fields but ``data`` are skipped."""

    def __init__(self, on_comment: Callable[[bytes], None] | None = None) -> None:
        """``on_comment``: called with the text of each comment that is not empty."""
        self._on_comment = on_comment
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of every event that ``part`` completes. Raises ``SkiffError`` for an event that does not end."""
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise SkiffError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(_FIELD):
                self._data.append(line.removeprefix(_FIELD).removeprefix(b" "))
            elif line.startswith(_COMMENT):
                text = line.removeprefix(_COMMENT).strip()
                if text and self._on_comment is not None:
                    self._on_comment(text)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
