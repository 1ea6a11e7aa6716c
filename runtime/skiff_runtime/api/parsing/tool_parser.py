"""What the parsers of tool calls have in common."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, ToolCallDelta
from skiff_runtime.api.parsing.streaming_json import ToolCallReader


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may call. ``limit``: how many calls are told. ``special``: tokens that are no text."""

    names: frozenset[str]
    limit: int | None = None
    special: tuple[str, ...] = ()


class ToolParser(ABC):
    """Follows an answer; subclasses name the places of their format, each a method that reads from ``_buffer``.

    A place returns whether it got anywhere; False means that it needs more text. Blanks around calls are dropped.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._buffer = ""
        self._ended = False
        self._deltas: list[Delta] = []
        self._blanks = ""
        self._calls = 0
        self._told = False
        self._opened = ""
        self._reader = ToolCallReader(tools.names)
        self._place: Callable[[], bool] = self.start

    def push(self, text: str) -> list[Delta]:
        """What is known now that ``text`` has come."""
        self._buffer += text
        while self._buffer and self._place():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back: of a call that was not known yet, all of it, as content."""
        self._ended = True
        deltas = self.push("")
        if not self._reader.known:
            self._say(self._opened + self._reader.raw)
        self._say(self._buffer)
        if not self._calls:
            self._deltas.append(ContentDelta(self._blanks))
        self._buffer = self._blanks = ""
        deltas += self._deltas
        self._deltas = []
        return [delta for delta in deltas if not (isinstance(delta, ContentDelta) and not delta.text)]

    @abstractmethod
    def start(self) -> bool:
        """The place at the beginning of an answer."""

    @abstractmethod
    def after_call(self) -> bool:
        """The place behind a whole call."""

    @abstractmethod
    def content(self) -> bool:
        """The place where text stands."""

    def call_id(self) -> str:
        """A fresh id."""
        return f"call_{secrets.token_hex(12)}"

    def _begin(self, opened: str, reader: ToolCallReader | None = None) -> None:
        """A call may begin here; ``opened`` is what was read as its beginning."""
        self._opened = opened
        self._reader = reader or ToolCallReader(self._tools.names)
        self._told = False
        self._place = self._call

    def _call(self) -> bool:
        reader = self._reader
        self._buffer = reader.push(self._buffer)
        if reader.known:
            self._tell(reader)
        if reader.broken and not reader.known:
            self._fall_back(self._opened + reader.raw)
        elif reader.done or reader.broken:
            self._calls += 1
            self._reader, self._opened = ToolCallReader(self._tools.names), ""
            self._place = self.after_call if reader.done else self.content
        return True

    def _tell(self, reader: ToolCallReader) -> None:
        arguments = reader.take_arguments()
        if self._tools.limit is not None and self._calls >= self._tools.limit:
            return
        if not self._told:
            self._told, self._blanks = True, ""
            self._deltas.append(ToolCallDelta(self._calls, self.call_id(), reader.name, arguments))
        elif arguments:
            self._deltas.append(ToolCallDelta(self._calls, arguments=arguments))

    def _fall_back(self, text: str) -> None:
        """What was read is no call, but content."""
        self._reader, self._opened = ToolCallReader(self._tools.names), ""
        self._say(text)
        self._place = self.content

    def _say(self, text: str) -> None:
        """Content; blanks at its end wait, for a call may follow."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._deltas.append(ContentDelta(shown))

    def _skip(self, characters: str) -> bool:
        """Drop these characters from the buffer's beginning; whether anything is left."""
        self._buffer = self._buffer.lstrip(characters)
        return bool(self._buffer)
