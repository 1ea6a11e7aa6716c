"""Mistral tool calls: ``[TOOL_CALLS] [{"name": ..., "arguments": ...}]``, since tokenizer v11 ``[TOOL_CALLS]name[ARGS]{...}``."""

import secrets
import string
from typing import Final

from skiff_runtime.api.parsing.markers import split_at_marker
from skiff_runtime.api.parsing.streaming_json import ToolCallReader
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolParser

CALLS: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Mistral's chat templates accept ids of exactly nine letters and digits."""
_WHITESPACE: Final = " \t\r\n"


class MistralParser(ToolParser):
    """Reads calls after a marker, either in a list or each with its name before the arguments."""

    _is_list = False

    def start(self) -> bool:
        self._state = self.content
        return True

    def content(self) -> bool:
        others = (token for token in self._options.special_tokens if token != CALLS)
        text, marker, self._buffer = split_at_marker(self._buffer, (CALLS, *others))
        self._add_content(text)
        if marker == CALLS:
            self._opening, self._is_list, self._state = CALLS, False, self._after_marker
        return marker is not None

    def after_call(self) -> bool:
        if not self._is_list:
            self._state = self.content
            return True
        if not self._skip(_WHITESPACE + ","):
            return False
        if self._buffer.startswith("{"):
            self._begin_call("")
            return True
        if self._buffer.startswith("]"):
            self._buffer = self._buffer[1:]
        self._state = self.content
        return True

    def make_call_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

    def _after_marker(self) -> bool:
        if not self._skip(_WHITESPACE):
            return False
        if self._buffer.startswith("["):
            self._buffer, self._is_list, self._state = self._buffer[1:], True, self._first_of_list
            self._opening += "["
        elif self._buffer.startswith("{"):
            self._begin_call(self._opening)
        else:
            self._state = self._name
        return True

    def _first_of_list(self) -> bool:
        if not self._skip(_WHITESPACE):
            return False
        self._begin_call(self._opening)
        return True

    def _name(self) -> bool:
        head, marker, rest = split_at_marker(self._buffer, (ARGS, "{"))
        # Text without a marker that is much longer than any name is no call: it is not held back any longer.
        max_length = 2 * max(map(len, self._options.names), default=0) + 64
        if marker is None and not self._is_finished and len(head) < max_length:
            return False
        name = head.partition(_CALL_ID)[0].strip()
        if marker is None or name not in self._options.names:
            self._fall_back_to_content(self._opening)
            return True
        opening = self._opening + head + ("" if marker == "{" else marker)
        self._begin_call(opening, ToolCallReader.of_arguments(name))
        self._buffer = marker + rest if marker == "{" else rest
        return True


class JsonListParser(MistralParser):
    """Reads a list of calls without a marker, as a grammar makes any model write it."""

    def start(self) -> bool:
        self._state = self._after_marker
        return True


MISTRAL: Final = ToolCallFormat("mistral", MistralParser, (CALLS,), opening=(CALLS, "["), closing=("]",))
MISTRAL_V11: Final = ToolCallFormat(
    "mistral",
    MistralParser,
    (CALLS, ARGS),
    before_name=(CALLS,),
    before_arguments=(ARGS,),
    after_arguments=(),
    separator=(),
)
JSON_LIST: Final = ToolCallFormat("list", JsonListParser, (), opening=("[",), closing=("]",))
"""A JSON list and nothing else. It replaces a format whose markers are special tokens where the model must call a tool."""
