"""Deltas of a chat message, and the interface of the parsers that find them in the generated text.

An output parser follows the text of one choice and divides it into content, reasoning and parts of tool calls. A request
whose output is content and nothing else has no parser: its text goes to the client as it comes.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct


class ContentDelta(Struct, frozen=True):
    """Text for the user."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolCallDelta(Struct, frozen=True):
    """A part of tool call ``index`` of this choice, counted from 0.

    The first part of a call has its ``id`` and ``name``. The ``arguments`` of all parts, joined, are JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Parses the text of one choice as it comes. It never raises, whatever the model writes.

    All text that it returns can be encoded in UTF-8. A model may write the escape of half of a surrogate pair, which
    Python's parsers decode to a string that cannot: an exception in a response writer would end the api process.
    """

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that ``text`` completes; text that can still mean several things is held back."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back. The text has ended, possibly in the middle of a call or of the reasoning."""
        ...


MakeOutputParser = Callable[[], OutputParser]
"""Makes the parser of one choice."""
