"""The parser of one choice: reasoning first, then tool calls or plain content."""

from collections.abc import Sequence

from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, ReasoningDelta
from skiff_runtime.api.parsing.reasoning_parser import ReasoningParser
from skiff_runtime.api.parsing.tool_parser import ToolParser


class ChatOutputParser:
    """A ``OutputParser`` made of what the request needs; at least one of the two."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Delta]:
        return self._of([text] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        deltas = [] if self._reasoning is None else self._of(self._reasoning.finish())
        return deltas if self._tools is None else [*deltas, *self._tools.finish()]

    def _of(self, pieces: Sequence[ReasoningDelta | str]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, ReasoningDelta):
                deltas.append(piece)
            elif self._tools is None:
                deltas.append(ContentDelta(piece))
            else:
                deltas += self._tools.push(piece)
        return deltas
