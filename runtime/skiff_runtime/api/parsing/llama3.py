"""Llama 3's tool calls: an answer that is ``{"name": ..., "parameters": ...}``, perhaps behind ``<|python_tag|>``."""

from typing import Final

from skiff_runtime.api.parsing.markers import begins, cut
from skiff_runtime.api.parsing.tool_parser import ToolParser

TAG: Final = "<|python_tag|>"
_BETWEEN: Final = " \t\r\n;"


class Llama3Parser(ToolParser):
    """Calls at the beginning of an answer, or behind the tag; several are parted by semicolons."""

    def start(self) -> bool:
        blank = len(self._buffer) - len(self._buffer.lstrip())
        rest = self._buffer[blank:]
        if not rest:
            return False
        tagged = begins(rest, TAG)
        if tagged is None and not self._ended:
            return False
        if tagged:
            self._opened += self._buffer[: blank + len(TAG)]
            self._buffer = rest[len(TAG) :]
        elif rest.startswith("{"):
            opened, self._buffer = self._opened + self._buffer[:blank], rest
            self._begin("" if TAG in opened else opened)
        else:
            self._say("" if TAG in self._opened else self._opened)
            self._opened = ""
            self._place = self.content
        return True

    def content(self) -> bool:
        text, mark, self._buffer = cut(self._buffer, (TAG, *self._tools.special))
        self._say(text)
        if mark == TAG:
            self._opened, self._place = TAG, self.start
        return mark is not None

    def after_call(self) -> bool:
        if not self._skip(_BETWEEN):
            return False
        if self._buffer.startswith("{"):
            self._begin("")
        else:
            self._place = self.content
        return True
