"""Incremental JSON: the end of a value, and one tool call that is written as a JSON object."""

import json
from typing import Any, Final

from skiff_runtime.api.parsing.call_reader import CallReader

JSON_WHITESPACE: Final = frozenset(" \t\r\n")
_CLOSERS: Final = {"{": "}", "[": "]"}
_SCALAR: Final = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_MAX_HEAD_CHARACTERS: Final = 1 << 16
"""Text that is not known to be a call after this many characters is content, so that what is held back stays bounded."""


class JsonValueScanner:
    """Finds the end of one JSON value, character by character. ``is_done`` and ``is_broken`` report its state.

    The scanner tracks only brackets and quotation marks. It accepts text between them that is not JSON, because the
    arguments of a call go to the client as the model wrote them.
    """

    __slots__ = ("_closers", "_is_escaped", "_is_quoted", "first", "is_broken", "is_done")

    def __init__(self) -> None:
        self.first = ""
        self.is_done = False
        self.is_broken = False
        self._closers: list[str] = []
        self._is_quoted = False
        self._is_escaped = False

    def push(self, character: str) -> bool:
        """Take the next character. Return False where the value, a number or a word, ended before it."""
        if not self.first:
            self.first = character
        if self._is_quoted:
            self._push_quoted(character)
        elif character == '"' and (self._closers or self.first == '"'):
            self._is_quoted = True
        elif character in _CLOSERS and (self._closers or self.first == character):
            self._closers.append(_CLOSERS[character])
        elif self._closers:
            self._push_nested(character)
        elif character in _SCALAR:
            return True
        else:
            self.is_done = character in JSON_WHITESPACE or character in ",}]"
            self.is_broken = not self.is_done or self.first == character
            return False
        return True

    def _push_quoted(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_quoted = False
            self.is_done = not self._closers

    def _push_nested(self, character: str) -> None:
        if character in "}]":
            self.is_broken = self._closers.pop() != character
            self.is_done = not self._closers and not self.is_broken


class ToolCallReader(CallReader):
    """Reads ``{"name": ..., "arguments": {...}}`` of a tool in ``names``, with the members in any order; others are skipped."""

    __slots__ = (
        "_arguments_only",
        "_has_arguments",
        "_key",
        "_names",
        "_state",
        "_text",
        "_value",
    )

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._arguments_only = False
        self._has_arguments = False
        self._state = "start"  # start, member, key, colon, value, after
        self._key = ""
        self._text: list[str] = []
        """Characters of a key, or of a value that is not streamed."""
        self._value = JsonValueScanner()

    @staticmethod
    def of_arguments(name: str) -> "ToolCallReader":
        """Make a reader of the arguments only, for formats that write the name before the JSON."""
        reader = ToolCallReader(frozenset((name,)))
        reader.name, reader._arguments_only = name, True
        reader._state, reader._key = "value", _ARGUMENT_KEYS[0]
        return reader

    def push(self, text: str) -> str:
        for index, character in enumerate(text):
            if self.is_done or self.is_broken:
                return text[index:]
            if not self.is_known:
                self.raw += character
            self._push(character)
            # The character that breaks a known call outside of a value is no part of it: it is content.
            if self.is_broken and self.is_known and self._state != "value":
                return text[index:]
            self.is_broken = self.is_broken or (not self.is_known and len(self.raw) > _MAX_HEAD_CHARACTERS)
        return ""

    def _push(self, character: str) -> None:
        match self._state:
            case "key":
                self._push_key(character)
            case "value":
                self._push_value(character)
            case _ if character not in JSON_WHITESPACE:
                self._push_punctuation(character)

    def _push_punctuation(self, character: str) -> None:
        match self._state, character:
            case "start", "{":
                self._state = "member"
            case "member", '"':
                self._state, self._text, self._value = "key", ['"'], JsonValueScanner()
                self._value.push(character)
            case "colon", ":":
                self._state, self._text, self._value = "value", [], JsonValueScanner()
            case "after", ",":
                self._state = "member"
            case "after", "}":
                self._end_call()
            case _:
                self.is_broken = True

    def _push_key(self, character: str) -> None:
        self._value.push(character)
        self._text.append(character)
        if self._value.is_done:
            self._state, self._key = "colon", str(_decode("".join(self._text)))

    def _push_value(self, character: str) -> None:
        if character in JSON_WHITESPACE and not self._value.first:
            return
        belongs = self._value.push(character)
        # Arguments that are an object are streamed as they come; any other value is decoded at its end.
        is_streamed = self._key in _ARGUMENT_KEYS and self._value.first == "{"
        if belongs and is_streamed:
            self._arguments.append(character)
            self._has_arguments = True
            self.is_known = self.name is not None
        elif belongs:
            self._text.append(character)
        self.is_broken = self._value.is_broken or (self._arguments_only and not is_streamed)
        if self._value.is_done:
            self._end_value(is_streamed=is_streamed)
        if not belongs and not self.is_broken:
            self._push(character)

    def _end_value(self, *, is_streamed: bool) -> None:
        self._state = "after"
        self.is_done = self._arguments_only
        if self._key == "name":
            name = _decode("".join(self._text))
            self.name = name if isinstance(name, str) and name in self._names else None
            self.is_broken = self.name is None
            self.is_known = self.name is not None and bool(self._arguments)
        elif self._key in _ARGUMENT_KEYS and not is_streamed:
            arguments = _as_object(_decode("".join(self._text)))
            self._arguments = [arguments] if arguments else []
            self._has_arguments = bool(arguments)
            self.is_broken = not self._has_arguments

    def _end_call(self) -> None:
        self.is_known = self.is_done = self.name is not None
        self.is_broken = not self.is_known
        if not self._has_arguments:
            self._arguments = ["{}"]


def _decode(text: str) -> Any:
    """Return the decoded value; ``...`` where the text is not JSON, because None is a value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...


def _as_object(value: Any) -> str:
    """Return the JSON text of arguments that were written as null or as a string; "" where they are no object.

    The string may have half of a surrogate pair, which no response can carry: such a text is no object either.
    """
    if value is None:
        return "{}"
    if isinstance(value, str) and isinstance(_decode(value), dict) and _is_encodable(value):
        return value
    return ""


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
