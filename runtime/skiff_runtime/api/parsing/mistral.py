"""Mistral's tool calls: ``[TOOL_CALLS] [{"name": ..., "arguments": ...}]``, and later ``[TOOL_CALLS]name[ARGS]{...}``."""

import secrets
import string
from typing import Final

from skiff_runtime.api.parsing.markers import cut
from skiff_runtime.api.parsing.streaming_json import ToolCallReader
from skiff_runtime.api.parsing.tool_parser import ToolParser

CALLS: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Mistral's chat templates take ids of exactly nine letters and digits."""
_BLANKS: Final = " \t\r\n"


class MistralParser(ToolParser):
    """Calls behind a mark, in a list or each with its name in front."""

    _listed = False

    def start(self) -> bool:
        self._place = self.content
        return True

    def content(self) -> bool:
        text, mark, self._buffer = cut(self._buffer, (CALLS, *self._plain_special()))
        self._say(text)
        if mark == CALLS:
            self._opened, self._listed, self._place = CALLS, False, self._after_mark
        return mark is not None

    def after_call(self) -> bool:
        if not self._listed:
            self._place = self.content
            return True
        if not self._skip(_BLANKS + ","):
            return False
        if self._buffer.startswith("{"):
            self._begin("")
            return True
        if self._buffer.startswith("]"):
            self._buffer = self._buffer[1:]
        self._place = self.content
        return True

    def call_id(self) -> str:
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))

    def _after_mark(self) -> bool:
        if not self._skip(_BLANKS):
            return False
        if self._buffer.startswith("["):
            self._buffer, self._listed, self._place = self._buffer[1:], True, self._first_of_list
            self._opened += "["
        elif self._buffer.startswith("{"):
            self._begin(self._opened)
        else:
            self._place = self._name
        return True

    def _first_of_list(self) -> bool:
        if not self._skip(_BLANKS):
            return False
        self._begin(self._opened)
        return True

    def _name(self) -> bool:
        head, mark, rest = cut(self._buffer, (ARGS, "{"))
        if (
            mark is None
            and not self._ended
            and len(head) < 2 * max(map(len, self._tools.names), default=0) + 64
        ):
            return False
        name = head.partition(_CALL_ID)[0].strip()
        if mark is None or name not in self._tools.names:
            self._fall_back(self._opened)
            return True
        self._begin(self._opened + head + ("" if mark == "{" else mark), ToolCallReader.of_arguments(name))
        self._buffer = mark + rest if mark == "{" else rest
        return True

    def _plain_special(self) -> tuple[str, ...]:
        return tuple(mark for mark in self._tools.special if mark != CALLS)


class ListParser(MistralParser):
    """A list of calls without any mark, as a grammar makes a model write it."""

    def start(self) -> bool:
        self._place = self._after_mark
        return True
