"""JSON objects in text that a model or a client wrote, such as the arguments of a call."""

from typing import Any

import msgspec


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` is; None for any other text, one that is nested too deeply included."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
