"""Server-sent events: bytes made once a stream, so that a token costs one escaped string and two joins."""

from typing import Any, Final

import msgspec

encode_json: Final = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that carries ``value`` as JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


class EventTemplate:
    """An event whose JSON is the same each time but for one value."""

    __slots__ = ("_after", "_before")

    def __init__(self, template: dict[str, Any], hole: str) -> None:
        """``template`` holds the string ``hole`` once, as the value to be filled in."""
        before, found, after = event(template).partition(encode_json(hole))
        assert found and encode_json(hole) not in after, hole
        self._before = before
        self._after = after

    def fill(self, value: Any) -> bytes:
        """The event with ``value`` in place of the hole."""
        return self._before + encode_json(value) + self._after
