"""Hermes' tool calls, as Qwen 2.5 and 3 write them: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

from typing import Final

from skiff_runtime.api.parsing.markers import begins, cut
from skiff_runtime.api.parsing.tool_parser import ToolParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_BLANKS: Final = " \t\r\n"


class HermesParser(ToolParser):
    """Calls between tags, content before and between them."""

    def start(self) -> bool:
        self._place = self.content
        return True

    def content(self) -> bool:
        text, mark, self._buffer = cut(self._buffer, (OPEN, *self._tools.special))
        self._say(text)
        if mark == OPEN:
            self._begin(OPEN)
        return mark is not None

    def after_call(self) -> bool:
        """The closing tag, which a model may forget."""
        if not self._skip(_BLANKS):
            return False
        closed = begins(self._buffer, CLOSE)
        if closed is None and not self._ended:
            return False
        if closed:
            self._buffer = self._buffer[len(CLOSE) :]
        elif closed is None:
            self._buffer = ""
        self._place = self.content
        return True
