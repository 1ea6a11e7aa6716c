"""One JSON value, followed character by character to its end."""

from typing import Final

BLANKS: Final = frozenset(" \t\r\n")
_CLOSERS: Final = {"{": "}", "[": "]"}
_SCALAR: Final = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")


class JsonValue:
    """``push`` returns whether a character belongs to the value; ``done`` and ``broken`` say how it stands.

    Brackets and quotation marks are followed, no more: what stands between them is the model's business.
    """

    __slots__ = ("_closers", "_escaped", "_quoted", "broken", "done", "first")

    def __init__(self) -> None:
        self.first = ""
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._quoted = False
        self._escaped = False

    def push(self, character: str) -> bool:
        """Take a character. False: the value, a number or a word, had ended before it."""
        if not self.first:
            self.first = character
        if self._quoted:
            self._push_quoted(character)
        elif character == '"' and (self._closers or self.first == '"'):
            self._quoted = True
        elif character in _CLOSERS and (self._closers or self.first == character):
            self._closers.append(_CLOSERS[character])
        elif self._closers:
            self._push_inside(character)
        elif character in _SCALAR:
            return True
        else:
            self.done = character in BLANKS or character in ",}]"
            self.broken = not self.done or self.first == character
            return False
        return True

    def _push_quoted(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            self.done = not self._closers

    def _push_inside(self, character: str) -> None:
        if character in "}]":
            self.broken = self._closers.pop() != character
            self.done = not self._closers and not self.broken
