"""Incremental decoding: token ids to text increments, with one stream for each request.

There are two implementations. ``ByteLevelStream`` serves byte-level vocabularies by one table look-up for each token.
``WindowStream`` serves every other decoder by decoding a short window of tokens twice, as the incremental detokenizers
of vLLM and text-generation-inference do (``prefix_offset`` and ``read_offset``). Both cost the same for the millionth
token as for the first, hold back bytes that are no whole character yet, and add up to exactly the text that decoding
all ids at once yields.
"""

import re
from codecs import utf_8_decode
from typing import Final, Protocol

from tokenizers import Tokenizer

Piece = str | bytes
"""The text of one token, or its bytes if they are no valid UTF-8 by themselves."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of the tokens of single bytes, in vocabularies with byte fallback."""
_MAX_HELD_TOKENS: Final = 8
"""A character has at most four bytes, so a longer tail of replacement characters is malformed, not unfinished."""


class DecodeStream(Protocol):
    """Incremental decoder of one request."""

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; "" while bytes are held back."""
        ...

    def flush(self) -> str:
        """Return the text still held back, at the end of the stream."""
        ...


class TokenDecoder(Protocol):
    """Decoder of one vocabulary; creates the streams."""

    def stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """Create a stream; ``skip_special_tokens`` omits tokens such as <|end|> from the text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, special or not; b"" for an id outside the vocabulary."""
        ...


class ByteLevelStream:
    """Stream over a table of pieces. Malformed bytes become U+FFFD, one for each maximal subpart."""

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
    """Decoder of a byte-level vocabulary. ``pieces[i]`` belongs to token i; ``special`` are ids of special tokens."""

    def __init__(self, pieces: list[Piece], special: tuple[int, ...]) -> None:
        self._all_pieces = pieces
        self.plain_pieces = list(pieces)
        """``pieces``, with "" for special tokens."""
        for token in special:
            self.plain_pieces[token] = ""

    def pad_to(self, size: int) -> None:
        """Extend the vocabulary to ``size`` ids; each id that is added decodes to its number."""
        words = [f" {token}" for token in range(len(self._all_pieces), size)]
        self._all_pieces += words
        self.plain_pieces += words

    def stream(self, *, skip_special_tokens: bool) -> ByteLevelStream:
        return ByteLevelStream(self.plain_pieces if skip_special_tokens else self._all_pieces)

    def token_bytes(self, token: int) -> bytes:
        piece = self._all_pieces[token] if 0 <= token < len(self._all_pieces) else b""
        return piece.encode() if isinstance(piece, str) else piece


class WindowStream:
    """Stream over any decoder: a new token adds the difference between two decoded windows.

    ``_ids`` is the window. Its first ``_num_shown`` tokens last completed text; they stay as context, because a decoder
    may treat the first token of a text differently. The others are held back. When text is complete the window
    moves on to them, so it stays short.
    """

    __slots__ = ("_ids", "_num_shown", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        """Tokens in ``skipped`` write nothing."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, token: int) -> str:
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text, shown_length = self._decode_window()
        is_unfinished = text.endswith(_REPLACEMENT) and len(self._ids) - self._num_shown <= _MAX_HELD_TOKENS
        if len(text) <= shown_length or is_unfinished:
            return ""
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return text[shown_length:]

    def flush(self) -> str:
        text, shown_length = self._decode_window()
        self._ids.clear()
        self._num_shown = 0
        return text[shown_length:]

    def _decode_window(self) -> tuple[str, int]:
        """Return the window's text, and the length of the part of it that was shown before."""
        text = self._decode(self._ids)
        return text, len(self._decode(self._ids[: self._num_shown]))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class WindowDecoder:
    """Decoder of any vocabulary, by the decoder of its tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        self._added = {token: content.content.encode() for token, content in added.items()}
        self._bytes: dict[int, bytes] = {}

    def stream(self, *, skip_special_tokens: bool) -> WindowStream:
        return WindowStream(self._tokenizer, self._special if skip_special_tokens else frozenset())

    def token_bytes(self, token: int) -> bytes:
        cached = self._bytes.get(token)
        if cached is None:
            cached = self._bytes[token] = self._decode_bytes(token)
        return cached

    def _decode_bytes(self, token: int) -> bytes:
        content = self._tokenizer.id_to_token(token) if token >= 0 else None
        if content is None:
            return b""
        if token in self._added:
            return self._added[token]
        if byte_token := _BYTE_TOKEN.fullmatch(content):
            return bytes([int(byte_token[1], 16)])
        # The second of two equal tokens, because a decoder may treat the first one of a text differently.
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()
