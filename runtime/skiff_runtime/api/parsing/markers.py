"""Finding marks in a text that comes in pieces."""

from collections.abc import Sequence


def cut(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first mark, the mark, and what follows it.

    Without a mark: what is certainly text, None, and the end of ``text``, which may begin a mark.
    """
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, _, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    held = max((_overlap(text, mark) for mark in marks), default=0)
    end = len(text) - held
    return text[:end], None, text[end:]


def begins(text: str, mark: str) -> bool | None:
    """Whether ``text`` begins with ``mark``; None while it is too short to tell."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``, but is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
