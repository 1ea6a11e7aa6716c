"""Reasoning between ``<think>`` and ``</think>``, parted from the answer behind it."""

from enum import Enum, auto
from typing import Final

from skiff_runtime.api.parsing.deltas import ReasoningDelta
from skiff_runtime.api.parsing.markers import begins, cut

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ReasoningStart(Enum):
    """How a prompt leaves the answer to begin: within reasoning, behind it, or as the model likes."""

    OPENED = auto()
    CLOSED = auto()
    FREE = auto()


def detect_reasoning_start(prompt: str) -> ReasoningStart:
    """What the end of a rendered prompt says."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):
        return ReasoningStart.CLOSED
    return ReasoningStart.OPENED if end.endswith(OPEN) else ReasoningStart.FREE


class ReasoningParser:
    """Follows an answer. Blanks around reasoning are dropped, from its beginning and between it and the answer."""

    def __init__(self, thinking: ReasoningStart) -> None:
        self._buffer = ""
        self._blanks = ""
        self._told = False
        self._step = self._think if thinking is ReasoningStart.OPENED else self._begin

    def push(self, text: str) -> list[ReasoningDelta | str]:
        """Reasoning, and text of the answer as strings."""
        self._buffer += text
        found: list[ReasoningDelta | str] = []
        while self._buffer and self._step(found):
            pass
        return found

    def finish(self) -> list[ReasoningDelta | str]:
        """What was held back."""
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        return [ReasoningDelta(self._blanks + rest)] if self._step == self._think else [rest]

    def _begin(self, _: list[ReasoningDelta | str]) -> bool:
        rest = self._buffer.lstrip()
        opened = begins(rest, OPEN)
        if opened:
            self._buffer, self._step = rest[len(OPEN) :], self._think
        elif opened is False:
            self._step = self._answer
        return opened is not None

    def _think(self, found: list[ReasoningDelta | str]) -> bool:
        text, mark, self._buffer = cut(self._buffer, (CLOSE,))
        text = self._blanks + text
        shown = text.rstrip() if self._told else text.strip()
        self._blanks = text[len(text.rstrip()) :]
        if shown:
            self._told = True
            found.append(ReasoningDelta(shown))
        if mark is not None:
            self._blanks, self._step = "", self._gap
        return mark is not None

    def _gap(self, _: list[ReasoningDelta | str]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._answer
        return bool(self._buffer)

    def _answer(self, found: list[ReasoningDelta | str]) -> bool:
        found.append(self._buffer)
        self._buffer = ""
        return True
