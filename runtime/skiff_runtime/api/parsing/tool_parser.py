"""Base of the tool call parsers, and the description of a tool call format.

A new format is a module with a ``ToolParser`` and a ``ToolCallFormat``, and a case in ``select_tool_call_format``.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skiff_runtime.api.parsing.call_reader import CallReader
from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, ToolCallDelta
from skiff_runtime.api.parsing.markers import split_at_marker, starts_with_marker
from skiff_runtime.api.parsing.parameter_formats import (
    TagFormat,
    any_of,
    constant,
    json_parameters,
    sequence,
)
from skiff_runtime.api.parsing.streaming_json import ToolCallReader


@dataclass(frozen=True, slots=True)
class ToolCallOptions:
    """The tools that a choice may call.

    ``names``: the tools' names. ``max_calls``: further calls are dropped. ``special_tokens``: texts of special tokens
    that are dropped from the content. ``schemas``: the JSON Schema of each tool's arguments, by which formats without
    JSON find the types of values. ``is_enforced``: a grammar lets the model write calls and nothing else, so a beginning
    of a call that the end of the text cuts off is markup, and never content.
    """

    names: frozenset[str]
    max_calls: int | None = None
    special_tokens: tuple[str, ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_enforced: bool = False


class ToolParser(ABC):
    """Divides the text of one choice into content and tool calls.

    A parser is a state machine: ``_state`` is the method that reads next from ``_buffer``. It returns False where it
    needs more text. Whitespace around calls is dropped.
    """

    def __init__(self, options: ToolCallOptions) -> None:
        self._options = options
        self._buffer = ""
        self._is_finished = False
        self._deltas: list[Delta] = []
        self._whitespace = ""
        """Whitespace at the end of the content, held back because a call may follow."""
        self._num_calls = 0
        self._is_call_reported = False
        self._opening = ""
        """Text that was read as the opening of a call, which is content if no call follows."""
        self._reader: CallReader = ToolCallReader(options.names)
        self._state: Callable[[], bool] = self.start

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that ``text`` completes."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back. A call that was not known yet is content, all of it, unless calls are enforced."""
        self._is_finished = True
        deltas = self.push("")
        if self._options.is_enforced:
            self._buffer = self._whitespace = ""
            return [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        if not self._reader.is_known:
            self._add_content(self._opening + self._reader.raw)
        self._add_content(self._buffer)
        if not self._num_calls:
            self._deltas.append(ContentDelta(self._whitespace))
        self._buffer = self._whitespace = ""
        deltas += self._deltas
        self._deltas = []
        return [delta for delta in deltas if not (isinstance(delta, ContentDelta) and not delta.text)]

    @abstractmethod
    def start(self) -> bool:
        """Read the beginning of the text."""

    @abstractmethod
    def content(self) -> bool:
        """Read content."""

    @abstractmethod
    def after_call(self) -> bool:
        """Read what follows a complete call."""

    def make_call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def _begin_call(self, opening: str, reader: CallReader | None = None) -> None:
        """Go on to read a possible call; ``opening`` is the text before it that belongs to it."""
        self._opening = opening
        self._reader = reader or ToolCallReader(self._options.names)
        self._is_call_reported = False
        self._state = self._read_call

    def _read_call(self) -> bool:
        reader = self._reader
        self._buffer = reader.push(self._buffer)
        if reader.is_known:
            self._report_call(reader)
        if reader.is_broken and not reader.is_known:
            self._fall_back_to_content(self._opening + reader.raw)
        elif reader.is_done or reader.is_broken:
            self._num_calls += 1
            self._reader, self._opening = ToolCallReader(self._options.names), ""
            self._state = self.after_call if reader.is_done else self.content
        return True

    def _report_call(self, reader: CallReader) -> None:
        arguments = reader.take_arguments()
        if self._options.max_calls is not None and self._num_calls >= self._options.max_calls:
            return
        if not self._is_call_reported:
            self._is_call_reported, self._whitespace = True, ""
            self._deltas.append(ToolCallDelta(self._num_calls, self.make_call_id(), reader.name, arguments))
        elif arguments:
            self._deltas.append(ToolCallDelta(self._num_calls, arguments=arguments))

    def _fall_back_to_content(self, text: str) -> None:
        """Report ``text``, which was read as a call and is none, as content."""
        self._reader, self._opening = ToolCallReader(self._options.names), ""
        self._add_content(text)
        self._state = self.content

    def _add_content(self, text: str) -> None:
        """Report content; whitespace at its end is held back."""
        text = self._whitespace + text
        shown = text.rstrip()
        self._whitespace = text[len(shown) :]
        if shown:
            self._deltas.append(ContentDelta(shown))

    def _split_beginning(self, tag: str) -> tuple[str, str, str] | None:
        """Return the whitespace at the beginning of the buffer, ``tag`` or "" behind it, and the rest; None if more text decides."""
        rest = self._buffer.lstrip()
        is_tagged = starts_with_marker(rest, tag) if rest else None
        if not rest or (is_tagged is None and not self._is_finished):
            return None
        blanks = self._buffer[: len(self._buffer) - len(rest)]
        return (blanks, tag, rest[len(tag) :]) if is_tagged else (blanks, "", rest)

    def _skip(self, characters: str) -> bool:
        """Drop these characters from the beginning of the buffer. Return whether anything is left."""
        self._buffer = self._buffer.lstrip(characters)
        return bool(self._buffer)


class ContentParser(ToolParser):
    """Reads content only, and drops special tokens from it."""

    def start(self) -> bool:
        self._state = self.content
        return True

    def content(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, self._options.special_tokens)
        self._add_content(text)
        return marker is not None

    def after_call(self) -> bool:
        raise AssertionError("content has no calls")


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as a grammar needs it: its name and the JSON Schema of its arguments."""

    name: str
    parameters: Any


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls: its parser, and the strings that a grammar needs to enforce it.

    A list of calls is ``opening``, the calls with ``separator`` between them, ``closing``. ``markers`` are the strings of
    the format that may be special tokens of the model. The detokenizer leaves special tokens out of the text, and a
    grammar cannot make the model write them.
    """

    name: str
    parser: type[ToolParser]
    markers: tuple[str, ...]
    opening: tuple[str, ...] = ()
    before_name: tuple[str, ...] = ('{"name": "',)
    before_arguments: tuple[str, ...] = ('", "arguments": ',)
    after_arguments: tuple[str, ...] = ("}",)
    separator: tuple[str, ...] = (", ",)
    closing: tuple[str, ...] = ()
    arguments_format: Callable[[Mapping[str, Any]], TagFormat | None] = json_parameters
    """Describes the arguments of a tool with this JSON Schema; None where the format cannot express it."""

    def can_express(self, tools: Sequence[ToolSchema]) -> bool:
        """Return whether a grammar of this format can enforce the arguments of all ``tools``."""
        return all(self.arguments_format(tool.parameters) is not None for tool in tools)

    def can_be_enforced(self, special_tokens: frozenset[str]) -> bool:
        """Return whether a grammar can make the model write calls: none of their strings is a special token."""
        written = {*self.opening, *self.before_name, *self.before_arguments, *self.after_arguments}
        return special_tokens.isdisjoint(written)

    def calls_format(self, tools: Sequence[ToolSchema], *, parallel: bool) -> TagFormat:
        """Describe one call of one of the tools; with ``parallel``, one or more calls."""
        call = any_of([self._call_format(tool) for tool in tools])
        parts = [*map(constant, self.opening), call]
        if parallel:
            parts.append({"type": "star", "content": sequence([*map(constant, self.separator), call])})
        return sequence([*parts, *map(constant, self.closing)])

    def triggered_calls_format(self, tools: Sequence[ToolSchema]) -> TagFormat | None:
        """Describe text in which every call is valid; None where no marker of the format begins a call."""
        if self.opening or not self.markers or self.before_name[0] not in self.markers:
            return None
        tags = []
        for tool in tools:
            begin = "".join((*self.before_name, tool.name, *self.before_arguments))
            content, end = self._arguments_of(tool), "".join(self.after_arguments)
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return {"type": "triggered_tags", "triggers": [self.before_name[0]], "tags": tags}

    def _call_format(self, tool: ToolSchema) -> TagFormat:
        return sequence(
            [
                *map(constant, self.before_name),
                constant(tool.name),
                *map(constant, self.before_arguments),
                self._arguments_of(tool),
                *map(constant, self.after_arguments),
            ]
        )

    def _arguments_of(self, tool: ToolSchema) -> TagFormat:
        arguments = self.arguments_format(tool.parameters)
        assert arguments is not None, "callers check can_express"
        return arguments
