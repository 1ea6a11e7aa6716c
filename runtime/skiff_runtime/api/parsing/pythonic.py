"""Pythonic tool calls, as Llama 4 and models trained like it write them: ``[get_weather(city="Paris"), now()]``."""

import json
import string
from collections.abc import Callable
from typing import Final

from skiff_runtime.api.parsing.call_reader import CallReader
from skiff_runtime.api.parsing.markers import split_at_marker
from skiff_runtime.api.parsing.parameter_formats import python_parameters
from skiff_runtime.api.parsing.parameter_types import word_to_json
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolParser

TAG: Final = "<|python_start|>"
END_TAG: Final = "<|python_end|>"
TEMPLATE_SIGNS: Final = (TAG, "<|header_start|>", "[func_name1(")
"""Strings of chat templates for this format: Llama 4's tokens, and the example in the instructions to the model."""
_WHITESPACE: Final = " \t\r\n"
_NAME_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "_.-")
_WORD_CHARACTERS: Final = _NAME_CHARACTERS | {"+"}
_MAX_HEAD_CHARACTERS: Final = 1 << 12
"""Longer names, keys and words, and longer gaps before the first value, are not those of a call."""
_MAX_DEPTH: Final = 128
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}
_JSON_CLOSERS: Final = {"(": "}", "[": "]", "{": "}"}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_MAX_CODE_POINT: Final = 0x10FFFF


class StringLiteralReader:
    """Converts a string literal to JSON, character by character. ``is_done``: the literal has ended.

    The literal has one or three quotation marks on each side, and may span lines with either.
    """

    __slots__ = ("_escape", "_length", "_quote", "_run", "is_done")

    def __init__(self, quote: str) -> None:
        self.is_done = False
        self._quote = quote
        self._length = 0
        """Quotation marks on each side; 0 until that is known."""
        self._run = 1
        """Quotation marks that were read last, without other characters between them."""
        self._escape = ""

    def push(self, character: str) -> tuple[str, bool]:
        """Return the JSON that ``character`` completes, and False if the literal ended before it."""
        if not self._length:
            return self._push_opening(character)
        if self._escape:
            return self._push_escape(character), True
        if character == self._quote:
            self._run += 1
            self.is_done = self._run == self._length
            return '"' if self.is_done else "", True
        text, self._run = self._quote * self._run, 0
        if character == "\\":
            self._escape = character
            return _encode(text), True
        return _encode(text + character), True

    def _push_opening(self, character: str) -> tuple[str, bool]:
        if character == self._quote:
            self._run += 1
            if self._run == 3:
                self._length, self._run = 3, 0
                return '"', True
            return "", True
        if self._run == 2:  # an empty literal
            self.is_done = True
            return '""', False
        self._length, self._run = 1, 0
        text, _ = self.push(character)
        return '"' + text, True

    def _push_escape(self, character: str) -> str:
        kind = (self._escape + character)[1]
        length = _HEX_LENGTHS.get(kind)
        if length is None:
            self._escape = ""
            # Python keeps the backslash of an escape that it does not know.
            return _encode(_ESCAPES.get(character, "\\" + character))
        if self._escape != "\\" and character not in string.hexdigits:
            text, self._escape = self._escape, ""
            return _encode(text) + self.push(character)[0]
        self._escape += character
        if len(self._escape) < 2 + length:
            return ""
        text, self._escape = self._escape, ""
        code = int(text[2:], 16)
        if 0xD800 <= code < 0xE000:  # half of a pair of surrogates, which JSON writes in the same way
            return f"\\u{code:04x}"
        return _encode(text if code > _MAX_CODE_POINT else chr(code))


class PythonCallReader(CallReader):
    """Reads ``name(key=value, ...)``.

    Values are literals: strings, numbers, constants in the spelling of
    Python or JSON, lists, and dictionaries whose keys are strings. A call that breaks once it is known is completed to
    valid JSON.
    """

    __slots__ = (
        "_brackets",
        "_names",
        "_num_read",
        "_separator",
        "_state",
        "_string",
        "_word",
    )

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._brackets: list[str] = []
        self._separator = ""
        """The text that separates the next member from the one before it."""
        self._string: StringLiteralReader | None = None
        self._word = ""
        self._num_read = 0
        # Reads one character; returns False where the character belongs to what follows.
        self._state: Callable[[str], bool] = self._read_name

    def push(self, text: str) -> str:
        for index, character in enumerate(text):
            while not (self.is_done or self.is_broken) and not self._state(character):
                pass
            if self.is_broken and not self.is_done:
                return text[index:]
            if not self.is_known:
                self.raw += character
                self.is_broken = len(self.raw) > _MAX_HEAD_CHARACTERS
            if self.is_done or self.is_broken:
                return text[index + 1 :]
        return ""

    def _read_name(self, character: str) -> bool:
        if character in _NAME_CHARACTERS or (character in _WHITESPACE and not self._word):
            self._word += character.strip()
            return True
        if character != "(" or self._word not in self._names:
            return self._break_complete()
        self.name, self._word = self._word, ""
        self._open(character)
        return True

    def _open(self, bracket: str) -> None:
        self._arguments.append("[" if bracket == "[" else "{")
        self._brackets.append(bracket)
        self._separator = ""
        self._state = self._read_member

    def _read_member(self, character: str) -> bool:
        """Read the beginning of a member, or the end of the brackets: a comma may stand before it."""
        if character in _WHITESPACE:
            return True
        bracket = self._brackets[-1]
        if character == _CLOSERS[bracket]:
            self._close()
        elif bracket == "[":
            self._arguments.append(self._separator)
            self._state = self._read_value
            return False
        elif bracket == "{" and character in "\"'":
            self._arguments.append(self._separator)
            self._string, self._state = StringLiteralReader(character), self._read_string_key
        elif bracket == "(" and character in _NAME_CHARACTERS:
            self._word, self._state = character, self._read_key
        else:
            return self._break_complete()
        return True

    def _read_key(self, character: str) -> bool:
        if character in _NAME_CHARACTERS and len(self._word) < _MAX_HEAD_CHARACTERS:
            self._word += character
            return True
        self._arguments.append(f"{self._separator}{json.dumps(self._word)}: ")
        self._word, self._state = "", self._read_equals
        return False

    def _read_equals(self, character: str) -> bool:
        if character in _WHITESPACE:
            return True
        if character != "=":
            return self._break_without_value()
        self._state = self._read_value
        return True

    def _read_string_key(self, character: str) -> bool:
        belongs = self._read_string(character)
        if self._string is None:
            self._arguments.append(": ")
            self._state = self._read_colon
        return belongs

    def _read_colon(self, character: str) -> bool:
        if character in _WHITESPACE:
            return True
        if character != ":":
            return self._break_without_value()
        self._state = self._read_value
        return True

    def _read_value(self, character: str) -> bool:
        if character in _WHITESPACE:
            return True
        if character in "\"'":
            self._string, self._state = StringLiteralReader(character), self._read_string_value
        elif character in "[{" and len(self._brackets) < _MAX_DEPTH:
            self._open(character)
        elif character in _WORD_CHARACTERS:
            self._word, self._state = character, self._read_word
            return True
        else:
            return self._break_without_value()
        self.is_known = True
        return True

    def _read_string_value(self, character: str) -> bool:
        belongs = self._read_string(character)
        if self._string is None:
            self._state = self._read_comma
        return belongs

    def _read_string(self, character: str) -> bool:
        assert self._string is not None
        text, belongs = self._string.push(character)
        self._arguments.append(text)
        if self._string.is_done:
            self._string = None
        return belongs

    def _read_word(self, character: str) -> bool:
        if character in _WORD_CHARACTERS and len(self._word) < _MAX_HEAD_CHARACTERS:
            self._word += character
            return True
        value = word_to_json(self._word)
        if value is None:
            return self._break_without_value()
        self._arguments.append(value)
        self.is_known, self._word, self._state = True, "", self._read_comma
        return False

    def _read_comma(self, character: str) -> bool:
        if character in _WHITESPACE:
            return True
        if character == _CLOSERS[self._brackets[-1]]:
            self._close()
        elif character == ",":
            self._separator, self._state = ", ", self._read_member
        else:
            return self._break_complete()
        return True

    def _close(self) -> None:
        self._arguments.append(_JSON_CLOSERS[self._brackets.pop()])
        self._state = self._read_comma
        if not self._brackets:
            self.is_known = self.is_done = True

    def _break_without_value(self) -> bool:
        self._arguments.append("null")
        return self._break_complete()

    def _break_complete(self) -> bool:
        """End the reading, because the character cannot continue the call; complete the arguments to valid JSON."""
        self._arguments.append("".join(_JSON_CLOSERS[bracket] for bracket in reversed(self._brackets)))
        self.is_broken = True
        return True


def _encode(text: str) -> str:
    """Return ``text`` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PythonicParser(ToolParser):
    """Reads lists of calls at the beginning of the output, or after the tag."""

    _is_tagged = False

    def start(self) -> bool:
        beginning = self._split_beginning(TAG)
        if beginning is None:
            return False
        blanks, tag, rest = beginning
        if tag:
            self._is_tagged, self._buffer = True, rest
        elif rest.startswith("["):
            self._buffer = rest[1:]
            self._begin_list("" if self._is_tagged else blanks)
        else:
            self._state = self.content
        return True

    def content(self) -> bool:
        markers = (TAG, *((END_TAG,) if self._is_tagged else ()), *self._options.special_tokens)
        text, marker, self._buffer = split_at_marker(self._buffer, markers)
        self._add_content(text)
        if marker == TAG:
            self._is_tagged, self._state = True, self.start
        return marker is not None

    def after_call(self) -> bool:
        if not self._skip(_WHITESPACE):
            return False
        if self._buffer.startswith(","):
            self._buffer, self._state = self._buffer[1:], self._next_of_list
        elif self._buffer.startswith("]"):
            self._buffer, self._state = self._buffer[1:], self._after_list
        else:
            self._state = self.content
        return True

    def _begin_list(self, blanks: str) -> None:
        self._begin_call(blanks + "[", PythonCallReader(self._options.names))

    def _next_of_list(self) -> bool:
        if not self._skip(_WHITESPACE):
            return False
        if self._buffer.startswith("]"):
            self._state = self.after_call
        else:
            self._begin_call(",", PythonCallReader(self._options.names))
        return True

    def _after_list(self) -> bool:
        """Read what follows a list: some models write each call in a list of its own."""
        if not self._skip(_WHITESPACE):
            return False
        if self._buffer.startswith("["):
            self._buffer = self._buffer[1:]
            self._begin_list("")
        else:
            self._state = self.content
        return True


PYTHONIC: Final = ToolCallFormat(
    "pythonic",
    PythonicParser,
    (TAG, END_TAG),
    opening=("[",),
    before_name=(),
    before_arguments=("(",),
    after_arguments=(")",),
    closing=("]",),
    arguments_format=python_parameters,
)
