"""One tool call, written as a JSON object, read as it comes."""

import json
from typing import Any, Final

from skiff_runtime.api.parsing.json_value import BLANKS, JsonValue

_ARGUMENTS: Final = ("arguments", "parameters")
_MAX_HEAD_CHARACTERS: Final = 1 << 16
"""No call has so much text before it is known to be one; what does is content."""


class ToolCallReader:
    """``{"name": ..., "arguments": {...}}``, its members in any order, others passed over.

    ``known``: it is certain that this is a call of a tool in ``names``. ``done``, ``broken``: nothing more is read.
    """

    __slots__ = (
        "_alone",
        "_argued",
        "_arguments",
        "_key",
        "_names",
        "_place",
        "_raw",
        "_text",
        "_value",
        "broken",
        "done",
        "known",
        "name",
    )

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.known = self.done = self.broken = False
        self._names = names
        self._alone = False
        self._argued = False
        self._place = "start"
        self._key = ""
        self._raw = ""
        self._text = ""
        self._arguments = ""
        self._value = JsonValue()

    @staticmethod
    def of_arguments(name: str) -> "ToolCallReader":
        """A reader of the arguments alone, for formats that write the name before them."""
        reader = ToolCallReader(frozenset((name,)))
        reader.name, reader._alone, reader._place, reader._key = name, True, "value", _ARGUMENTS[0]
        return reader

    def push(self, text: str) -> str:
        """Read ``text``; what is left of it when the call has ended, or is none."""
        for index, character in enumerate(text):
            if self.done or self.broken:
                return text[index:]
            if not self.known:
                self._raw += character
            self._push(character)
            if self.broken and self.known and self._place != "value":
                return text[index:]
            self.broken = self.broken or (not self.known and len(self._raw) > _MAX_HEAD_CHARACTERS)
        return ""

    def take_arguments(self) -> str:
        """The arguments' text since the last call, where it is ``known``."""
        text, self._arguments = self._arguments, ""
        return text

    @property
    def raw(self) -> str:
        """All that was read before the call was ``known``."""
        return self._raw

    def _push(self, character: str) -> None:
        match self._place:
            case "key":
                self._push_key(character)
            case "value":
                self._push_value(character)
            case _ if character not in BLANKS:
                self._push_between(character)

    def _push_between(self, character: str) -> None:
        match self._place, character:
            case "start", "{":
                self._place = "member"
            case "member", '"':
                self._place, self._key, self._value = "key", '"', JsonValue()
                self._value.push(character)
            case "colon", ":":
                self._place, self._text, self._value = "value", "", JsonValue()
            case "after", ",":
                self._place = "member"
            case "after", "}":
                self._end()
            case _:
                self.broken = True

    def _push_key(self, character: str) -> None:
        self._value.push(character)
        self._key += character
        if self._value.done:
            self._place, self._key = "colon", str(_decoded(self._key))

    def _push_value(self, character: str) -> None:
        if character in BLANKS and not self._value.first:
            return
        belongs = self._value.push(character)
        streamed = self._key in _ARGUMENTS and self._value.first == "{"
        if belongs and streamed:
            self._arguments += character
            self._argued = True
            self.known = self.name is not None
        elif belongs:
            self._text += character
        self.broken = self._value.broken or (self._alone and not streamed)
        if self._value.done:
            self._end_value(streamed=streamed)
        if not belongs and not self.broken:
            self._push(character)

    def _end_value(self, *, streamed: bool) -> None:
        self._place = "after"
        self.done = self._alone
        if self._key == "name":
            name = _decoded(self._text)
            self.name = name if isinstance(name, str) and name in self._names else None
            self.broken = self.name is None
            self.known = self.name is not None and bool(self._arguments)
        elif self._key in _ARGUMENTS and not streamed:
            self._arguments = _as_object(_decoded(self._text))
            self._argued = bool(self._arguments)
            self.broken = not self._argued

    def _end(self) -> None:
        self.known = self.done = self.name is not None
        self.broken = not self.known
        if not self._argued:
            self._arguments = "{}"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...


def _as_object(value: Any) -> str:
    """The text of arguments that were written as a string, or as nothing; "" where they are no object."""
    if value is None:
        return "{}"
    if isinstance(value, str) and isinstance(_decoded(value), dict):
        return value
    return ""
