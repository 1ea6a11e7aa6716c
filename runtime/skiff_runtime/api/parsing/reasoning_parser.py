"""The reasoning parser, which separates the text between two markers, such as ``<think>``, from the output after it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from skiff_runtime.api.parsing.deltas import ReasoningDelta
from skiff_runtime.api.parsing.markers import split_at_marker, starts_with_marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around the reasoning. With ``starts_inside``, models omit the first one though no prompt ends with it."""

    name: str
    open: str
    close: str
    starts_inside: bool = False

    @property
    def markers(self) -> tuple[str, str]:
        return self.open, self.close

    def detect_start(self, prompt: str) -> "ReasoningStart":
        """Return how the output starts after a rendered prompt."""
        end = prompt.rstrip()
        if end.endswith(self.close):
            return ReasoningStart.AFTER
        if self.starts_inside or end.endswith(self.open):
            return ReasoningStart.INSIDE
        return ReasoningStart.OPTIONAL

    def find_start(self, text: str) -> "ReasoningStart":
        """Return how the output continues after ``text``, the beginning of an answer."""
        return (
            ReasoningStart.INSIDE if text.rfind(self.open) > text.rfind(self.close) else ReasoningStart.AFTER
        )


THINK: Final = ReasoningFormat("think", "<think>", "</think>")
DEEPSEEK_R1: Final = ReasoningFormat("deepseek_r1", "<think>", "</think>", starts_inside=True)
MISTRAL: Final = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
REASONING_FORMATS: Final = {each.name: each for each in (THINK, DEEPSEEK_R1, MISTRAL)}


class ReasoningStart(Enum):
    """The start of the output as the prompt leaves it: inside reasoning, after it, or with optional reasoning."""

    INSIDE = auto()
    AFTER = auto()
    OPTIONAL = auto()


class ReasoningParser:
    """A state machine over the text of one choice: ``_state`` is the method that reads next.

    Whitespace at both ends of the reasoning is dropped, and so is whitespace between it and the output after it. Some
    models write the first marker again though the prompt ends with it.
    """

    def __init__(self, start: ReasoningStart, reasoning_format: ReasoningFormat = THINK) -> None:
        self._format = reasoning_format
        self._is_inside = start is ReasoningStart.INSIDE
        self._buffer = ""
        self._whitespace = ""
        self._has_reasoning = False
        self._state: Callable[[list[ReasoningDelta | str]], bool] = self._read_start

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
        if self._state == self._read_reasoning:
            return [ReasoningDelta(self._whitespace + rest)]
        is_reasoning = self._is_inside and self._state == self._read_start
        return [ReasoningDelta(rest.strip())] if is_reasoning else [rest]

    def _read_start(self, _: list[ReasoningDelta | str]) -> bool:
        rest = self._buffer.lstrip()
        is_open = starts_with_marker(rest, self._format.open)
        if is_open:
            self._buffer, self._state = rest[len(self._format.open) :], self._read_reasoning
        elif is_open is False:
            self._state = self._read_reasoning if self._is_inside else self._read_rest
        return is_open is not None

    def _read_reasoning(self, found: list[ReasoningDelta | str]) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, (self._format.close,))
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
