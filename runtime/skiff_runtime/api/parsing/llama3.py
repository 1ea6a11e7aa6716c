"""Llama 3 tool calls: an output that is ``{"name": ..., "parameters": ...}``, possibly after ``<|python_tag|>``."""

from typing import Final

from skiff_runtime.api.parsing.markers import split_at_marker
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolParser

TAG: Final = "<|python_tag|>"
_SEPARATORS: Final = " \t\r\n;"


class Llama3Parser(ToolParser):
    """Reads calls at the beginning of the output, or after the tag, with semicolons between them."""

    def start(self) -> bool:
        beginning = self._split_beginning(TAG)
        if beginning is None:
            return False
        blanks, tag, rest = beginning
        if tag:
            self._opening += blanks + tag
            self._buffer = rest
        elif rest.startswith("{"):
            opening, self._buffer = self._opening + blanks, rest
            self._begin_call("" if TAG in opening else opening)
        else:
            self._add_content("" if TAG in self._opening else self._opening)
            self._opening = ""
            self._state = self.content
        return True

    def content(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, (TAG, *self._options.special_tokens))
        self._add_content(text)
        if marker == TAG:
            self._opening, self._state = TAG, self.start
        return marker is not None

    def after_call(self) -> bool:
        if not self._skip(_SEPARATORS):
            return False
        if self._buffer.startswith("{"):
            self._begin_call("")
        else:
            self._state = self.content
        return True


LLAMA3: Final = ToolCallFormat(
    "llama3", Llama3Parser, (TAG,), before_arguments=('", "parameters": ',), separator=("; ",)
)
