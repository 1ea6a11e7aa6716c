"""The reasoning parser, which separates the text between ``<think>`` and ``</think>`` from the output after it."""

from enum import Enum, auto
from typing import Final

from skiff_runtime.api.parsing.deltas import ReasoningDelta
from skiff_runtime.api.parsing.markers import split_at_marker, starts_with_marker

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ReasoningStart(Enum):
    """The start of the output as the prompt leaves it: inside reasoning, after it, or with optional reasoning."""

    INSIDE = auto()
    AFTER = auto()
    OPTIONAL = auto()


def detect_reasoning_start(prompt: str) -> ReasoningStart:
    """Return how the output starts after a rendered prompt."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):
        return ReasoningStart.AFTER
    return ReasoningStart.INSIDE if end.endswith(OPEN) else ReasoningStart.OPTIONAL


class ReasoningParser:
    """A state machine over the text of one choice: ``_state`` is the method that reads next.

    Whitespace at both ends of the reasoning is dropped, and so is whitespace between it and the output after it.
    """

    def __init__(self, start: ReasoningStart) -> None:
        self._buffer = ""
        self._whitespace = ""
        self._has_reasoning = False
        self._state = self._read_reasoning if start is ReasoningStart.INSIDE else self._read_start

    def push(self, text: str) -> list[ReasoningDelta | str]:
        """Return the reasoning, and as strings the text after it, that ``text`` completes."""
        self._buffer += text
        found: list[ReasoningDelta | str] = []
        while self._buffer and self._state(found):
            pass
        return found

    def finish(self) -> list[ReasoningDelta | str]:
        """Return what was held back."""
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        return [ReasoningDelta(self._whitespace + rest)] if self._state == self._read_reasoning else [rest]

    def _read_start(self, _: list[ReasoningDelta | str]) -> bool:
        rest = self._buffer.lstrip()
        is_open = starts_with_marker(rest, OPEN)
        if is_open:
            self._buffer, self._state = rest[len(OPEN) :], self._read_reasoning
        elif is_open is False:
            self._state = self._read_rest
        return is_open is not None

    def _read_reasoning(self, found: list[ReasoningDelta | str]) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, (CLOSE,))
        text = self._whitespace + text
        shown = text.rstrip() if self._has_reasoning else text.strip()
        self._whitespace = text[len(text.rstrip()) :]
        if shown:
            self._has_reasoning = True
            found.append(ReasoningDelta(shown))
        if marker is not None:
            self._whitespace, self._state = "", self._skip_gap
        return marker is not None

    def _skip_gap(self, _: list[ReasoningDelta | str]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._read_rest
        return bool(self._buffer)

    def _read_rest(self, found: list[ReasoningDelta | str]) -> bool:
        found.append(self._buffer)
        self._buffer = ""
        return True
