"""Hermes tool calls, as Qwen 2.5 and 3 write them: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

from typing import Final

from skiff_runtime.api.parsing.markers import split_at_marker, starts_with_marker
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_WHITESPACE: Final = " \t\r\n"


class HermesParser(ToolParser):
    """Reads calls between tags, with content before and between them."""

    def start(self) -> bool:
        self._state = self.content
        return True

    def content(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, (OPEN, *self._options.special_tokens))
        self._add_content(text)
        if marker == OPEN:
            self._begin_call(OPEN)
        return marker is not None

    def after_call(self) -> bool:
        """Read the closing tag, which a model may forget."""
        if not self._skip(_WHITESPACE):
            return False
        is_closed = starts_with_marker(self._buffer, CLOSE)
        if is_closed is None and not self._is_finished:
            return False
        if is_closed:
            self._buffer = self._buffer[len(CLOSE) :]
        elif is_closed is None:
            self._buffer = ""
        self._state = self.content
        return True


HERMES: Final = ToolCallFormat(
    "hermes",
    HermesParser,
    (OPEN, CLOSE),
    before_name=(OPEN, '\n{"name": "'),
    after_arguments=("}\n", CLOSE),
    separator=("\n",),
)
