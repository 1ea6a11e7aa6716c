"""Tool calls of Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A value is plain text. The type of its parameter decides whether it is a string or JSON.
"""

import json
from collections.abc import Mapping
from typing import Final

from skiff_runtime.api.parsing import hermes
from skiff_runtime.api.parsing.call_reader import CallReader
from skiff_runtime.api.parsing.hermes import HermesParser
from skiff_runtime.api.parsing.markers import split_at_marker, starts_with_marker
from skiff_runtime.api.parsing.parameter_formats import xml_parameters
from skiff_runtime.api.parsing.parameter_types import STRING, find_types, to_json
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolCallOptions

OPEN: Final = hermes.OPEN
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_MAX_NAME_CHARACTERS: Final = 256
_NULL: Final = "null"
_STRING_OR_NULL: Final = frozenset(("string", "null"))


class XmlCallReader(CallReader):
    """Reads a call from ``<function=`` or, with ``is_named``, from the name after it.

    A string streams; a value of another type follows as a whole.
    """

    def __init__(self, options: ToolCallOptions, *, is_named: bool = False) -> None:
        super().__init__()
        self._options = options
        self._buffer = ""
        self._num_parameters = 0
        self._types = STRING
        self._value: list[str] = []
        self._newline = ""
        """The newline at the end of the value so far, which belongs to it only if more text follows."""
        self._is_streamed = False
        self._is_begun = False
        self._state = self._read_name if is_named else self._read_opening

    def push(self, text: str) -> str:
        self._buffer += text
        if not self.is_known:
            self.raw += text
        while self._buffer and not (self.is_done or self.is_broken) and self._state():
            pass
        if not (self.is_done or self.is_broken):
            return ""
        rest, self._buffer = self._buffer, ""
        if self.is_broken and not self.is_known and rest:
            self.raw = self.raw[: -len(rest)]
        return rest

    def _read_opening(self) -> bool:
        self._buffer = self._buffer.lstrip()
        is_open = starts_with_marker(self._buffer, FUNCTION) if self._buffer else None
        if is_open:
            self._buffer, self._state = self._buffer[len(FUNCTION) :], self._read_name
        self.is_broken = is_open is False
        return is_open is not None

    def _read_name(self) -> bool:
        name = self._take_name()
        if name in self._options.names:
            self.name, self._state = name, self._read_body
        else:
            self.is_broken = self.is_broken or name is not None
        return name is not None

    def _read_body(self) -> bool:
        self._buffer = self._buffer.lstrip()
        found = {
            marker: starts_with_marker(self._buffer, marker)
            for marker in (PARAMETER, END_FUNCTION, hermes.CLOSE)
        }
        marker = next((marker for marker, is_there in found.items() if is_there), None)
        if marker is None and None in found.values():
            return False
        if marker == PARAMETER:
            self._buffer, self._state = self._buffer[len(PARAMETER) :], self._read_key
            return True
        self.is_known = self.is_known or marker is not None
        self.is_done, self.is_broken = marker is not None, marker is None
        if marker == END_FUNCTION:
            self._buffer = self._buffer[len(END_FUNCTION) :]
        self._arguments.append("}" if self._num_parameters else "{}")
        return True

    def _read_key(self) -> bool:
        key = self._take_name()
        if key is None:
            if self.is_broken and self.is_known:
                self._arguments.append("}")
            return False
        assert self.name is not None
        schema = self._options.schemas.get(self.name, {})
        properties = schema.get("properties")
        member = properties.get(key) if isinstance(properties, Mapping) else None
        # A parameter that the schema does not mention is text, as in the reference implementation of the format.
        self._types = STRING if member is None else find_types(member, schema)
        self._arguments.append(", " if self._num_parameters else "{")
        self._arguments.append(json.dumps(key, ensure_ascii=False) + ": ")
        self._num_parameters += 1
        self._value, self._newline = [], ""
        self._is_streamed = self._is_begun = False
        self.is_known, self._state = True, self._read_value
        return True

    def _read_value(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, (END_PARAMETER,))
        if not self._is_begun and text:
            self._is_begun, text = True, text.removeprefix("\n")
        self._add_value(text)
        if marker is not None:
            self._end_value()
            self._state = self._read_body
        return marker is not None

    def _add_value(self, text: str) -> None:
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_streamed:
            self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._value.append(text)
            self._is_streamed = self._types <= _STRING_OR_NULL and self._is_certainly_string()
            if self._is_streamed:
                self._arguments.append(json.dumps("".join(self._value), ensure_ascii=False)[:-1])

    def _is_certainly_string(self) -> bool:
        """Return whether the value so far cannot become ``null``, if the parameter may be that."""
        text = "".join(self._value).strip()
        return self._types == STRING or not _NULL.startswith(text.lower())

    def _end_value(self) -> None:
        if self._is_streamed:
            self._arguments.append('"')
        else:
            self._arguments.append(to_json("".join(self._value), self._types))

    def _take_name(self) -> str | None:
        """Take the name up to ``>``. It is None while it is incomplete, or where ``is_broken`` because it is none."""
        name, end, rest = self._buffer.partition(">")
        if len(name) > _MAX_NAME_CHARACTERS or "<" in name or "\n" in name or (end and not name):
            self.is_broken = True
            return None
        if not end:
            return None
        self._buffer = rest
        return name


class Qwen3CoderParser(HermesParser):
    """Reads calls between tags. Models often omit ``<tool_call>``, so that a function alone begins a call too."""

    def content(self) -> bool:
        markers = (OPEN, FUNCTION, *self._options.special_tokens)
        text, marker, self._buffer = split_at_marker(self._buffer, markers)
        self._add_content(text)
        if marker in (OPEN, FUNCTION):
            self._begin_call(marker, XmlCallReader(self._options, is_named=marker == FUNCTION))
        return marker is not None


QWEN3_CODER: Final = ToolCallFormat(
    "qwen3_coder",
    Qwen3CoderParser,
    (OPEN, hermes.CLOSE),
    before_name=(OPEN, "\n" + FUNCTION),
    before_arguments=(">\n",),
    after_arguments=(END_FUNCTION + "\n", hermes.CLOSE),
    separator=("\n",),
    arguments_format=xml_parameters,
)
