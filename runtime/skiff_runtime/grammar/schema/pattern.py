"""The ``pattern`` keyword: regular expressions for the characters between the quotes of a JSON string."""

import re
from typing import Final

from skiff_runtime.errors import InvalidRequest

MAX_PATTERN_CHARACTERS: Final = 4096
ANY_CHARACTER: Final = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""A character that needs no escape in a JSON string. Used for ``.``, because xgrammar's own also accepts bytes that are
no valid UTF-8: a client would see each of them as U+FFFD, and so more characters than the grammar counted."""
_CLASS_LETTERS: Final = "dDsSwW"
_META: Final = frozenset(".^$*+?()[]{}|\\")
_PARTS: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
"""An escape, a character class, or a dot."""
_QUANTIFIERS: Final = ("*", "?", "{")
_HEX_DIGITS: Final = {"x": 2, "u": 4}


def check_pattern(pattern: object, what: str) -> str:
    """Check that xgrammar can enforce ``pattern``, and return it as xgrammar needs it.

    The string of an answer matches the pattern as a whole and contains no escapes. So quotation marks, backslashes and
    control characters can be excluded by a character class, but not required. Raises ``InvalidRequest``, in which
    ``what`` names the pattern.
    """
    if not isinstance(pattern, str):
        raise InvalidRequest(f"{what} must be a string")
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise InvalidRequest(f"{what} is longer than {MAX_PATTERN_CHARACTERS} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not a valid regular expression: {error}") from None
    if re.search(r"\(\?(?!:)", pattern):
        raise InvalidRequest(f"{what} uses a group (?...) that is not supported; use (?:...)")
    if any(_is_unwritable(character) for character in _find_characters(pattern, what)):
        raise InvalidRequest(
            f"{what} requires a quotation mark, a backslash or a control character, which is not supported"
        )
    return _PARTS.sub(lambda part: ANY_CHARACTER if part[0] == "." else part[0], pattern)


def literal_prefix(pattern: str) -> str:
    """Return the letters with which every match begins; "" if the pattern has no evident ones."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    end = 1
    while end < len(pattern) and pattern[end] not in _META:
        end += 1
    if pattern[end : end + 1] in _QUANTIFIERS:
        end -= 1
    return pattern[1:end]


def _find_characters(pattern: str, what: str) -> list[str]:
    """Return every character that the pattern contains, literally or as an escape."""
    named = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character != "\\":
            named.append(character)
            continue
        letter = pattern[position : position + 1]
        position += 1
        if letter in _HEX_DIGITS:
            digits = pattern[position : position + _HEX_DIGITS[letter]]
            position += len(digits)
            named.append(chr(int(digits, 16)))
        elif letter.isascii() and letter.isalnum() and letter not in _CLASS_LETTERS:
            raise InvalidRequest(f"{what} uses \\{letter}, which is not supported")
        elif letter not in _CLASS_LETTERS:
            named.append(letter)
    return named


def _is_unwritable(character: str) -> bool:
    return character < " " or character in '"\\' or "\ud800" <= character <= "\udfff"
