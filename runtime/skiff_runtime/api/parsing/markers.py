"""Search for marker strings, such as ``<tool_call>``, in a text that comes in parts."""

from collections.abc import Sequence


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Return the text before the first marker, the marker, and the text after it.

    Without a marker, return the text that is certainly no part of one, None, and the end of ``text`` that may begin one.
    """
    found = [(start, -len(marker), marker) for marker in markers if (start := text.find(marker)) >= 0]
    if found:
        start, _, marker = min(found)  # the longer of two markers that begin at the same offset
        return text[:start], marker, text[start + len(marker) :]
    held = max((_overlap(text, marker) for marker in markers), default=0)
    end = len(text) - held
    return text[:end], None, text[end:]


def starts_with_marker(text: str, marker: str) -> bool | None:
    """Return whether ``text`` starts with ``marker``; None while it is too short to decide."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) else False


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
