"""Token ids to text increments, one stream a request.

``ByteLevelStream`` serves byte-level vocabularies by one table look-up a token; ``WindowStream`` serves every other
decoder by decoding a short window twice. Both cost the same for the millionth token as for the first, hold back
bytes that are no whole character yet, and end with exactly the text that decoding all ids at once gives.
"""

import re
from codecs import utf_8_decode
from typing import Final, Protocol

from tokenizers import Tokenizer

Piece = str | bytes
"""What one token writes: text, or bytes that are no valid UTF-8 by themselves."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of the tokens that stand for single bytes, in vocabularies with byte fallback."""
_MAX_HELD_TOKENS: Final = 8
"""A character has four bytes at most, so a longer tail of replacement characters is not an unfinished one."""


class DecodeStream(Protocol):
    """One request's text."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" while bytes are held back."""
        ...

    def flush(self) -> str:
        """What is still held back, at the end of the stream."""
        ...


class Decoder(Protocol):
    """One model's vocabulary, as a source of streams."""

    def stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """A fresh stream; ``skip_special_tokens`` leaves out tokens such as <|end|>."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token writes by itself, be it special or not; nothing for an id beyond the vocabulary."""
        ...


class ByteLevelStream:
    """A stream over a table of pieces. Malformed bytes become U+FFFD, one for each maximal subpart."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token: int) -> str:
        piece = self._pieces[token] if token < len(self._pieces) else ""
        if not self._held and isinstance(piece, str):
            return piece
        data = self._held + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class ByteLevelDecoder:
    """Streams over one byte-level vocabulary. ``pieces[i]`` is what token i writes; ``special``: ids of special tokens."""

    def __init__(self, pieces: list[Piece], special: tuple[int, ...]) -> None:
        self._all = pieces
        self.plain = list(pieces)
        """``pieces`` of ordinary tokens; special ones write nothing."""
        for token in special:
            self.plain[token] = ""

    def fill(self, size: int) -> None:
        """Let ids up to ``size`` that are beyond the vocabulary write their numbers."""
        words = [f" {token}" for token in range(len(self._all), size)]
        self._all += words
        self.plain += words

    def stream(self, *, skip_special_tokens: bool) -> ByteLevelStream:
        return ByteLevelStream(self.plain if skip_special_tokens else self._all)

    def token_bytes(self, token: int) -> bytes:
        piece = self._all[token] if 0 <= token < len(self._all) else b""
        return piece.encode() if isinstance(piece, str) else piece


class WindowStream:
    """A stream over any decoder: what a new token adds is the difference of two decoded windows.

    ``_ids`` begins with the tokens that last completed text (a decoder may treat the first token of a text
    differently, so they are the context), the first ``_shown`` of them; the rest is held back.
    """

    __slots__ = ("_ids", "_shown", "_silent", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        if token in self._silent or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text, length = self._new_text()
        unfinished = text.endswith(_REPLACEMENT) and len(self._ids) - self._shown <= _MAX_HELD_TOKENS
        if len(text) <= length or unfinished:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text[length:]

    def flush(self) -> str:
        text, length = self._new_text()
        self._ids.clear()
        self._shown = 0
        return text[length:]

    def _new_text(self) -> tuple[str, int]:
        """The window's text, and how much of it was shown before."""
        text = self._decode(self._ids)
        return text, len(self._decode(self._ids[: self._shown]))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class WindowDecoder:
    """Streams over a tokenizer's own decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        self._added = {token: content.content.encode() for token, content in added.items()}
        self._bytes: dict[int, bytes] = {}

    def stream(self, *, skip_special_tokens: bool) -> WindowStream:
        return WindowStream(self._tokenizer, self._special if skip_special_tokens else frozenset())

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._read_bytes(token)
        return known

    def _read_bytes(self, token: int) -> bytes:
        """As the token writes behind another one: a decoder may treat the first of a text differently."""
        content = self._tokenizer.id_to_token(token) if token >= 0 else None
        if content is None:
            return b""
        if token in self._added:
            return self._added[token]
        if fallback := _BYTE_TOKEN.fullmatch(content):
            return bytes([int(fallback[1], 16)])
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()
