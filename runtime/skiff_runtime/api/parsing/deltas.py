"""What the text of a chat answer means, piece by piece: content, reasoning, or a part of a tool call.

A ``OutputParser`` follows the text of one choice. Where an answer is content and nothing else there is none: the
``Parsing`` of such a request is None, and its text goes to the client as it comes.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct


class ContentDelta(Struct, frozen=True):
    """Text meant for the user."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Text that the model wrote to think."""

    text: str


class ToolCallDelta(Struct, frozen=True):
    """A piece of call number ``index`` of this choice, counted from 0.

    The first piece of a call has its ``id`` and ``name``; ``arguments`` of all pieces, joined, are its JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Follows the text of one choice; it never raises, whatever the model writes."""

    def push(self, text: str) -> list[Delta]:
        """What is known now that ``text`` has come; text that may mean several things is held back."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back; the text has ended, perhaps in the middle of something."""
        ...


Parsing = Callable[[], OutputParser]
"""Makes the parser of one choice."""
