"""The bytes that each token of a vocabulary adds to a text."""

import re
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.encoder import load_tokenizer

_BYTE_NAME: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NUM_BYTES: Final = 256


def read_token_bytes(path: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes that each of ``vocab_size`` token ids adds within a text, by the tokenizer.json in ``path``.

    They are empty for special tokens and for ids without a token (models pad their vocabulary). Raises ``ModelError``.
    """
    decoder = read_byte_level_decoder(path)
    if decoder is None:
        found = _decode_each(load_tokenizer(path))
    else:
        found = [piece.encode() if isinstance(piece, str) else piece for piece in decoder.plain_pieces]
    return (found + [b""] * (vocab_size - len(found)))[:vocab_size]


def _decode_each(tokenizer: Tokenizer) -> list[bytes]:
    """Decode each token after another one, for vocabularies that are not byte-level.

    Decoded alone, a token may lose a space (SentencePiece strips the first one of a text). So each is decoded after a
    plain letter, and the letter's text is cut off.
    """
    names = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, content in added.items() if content.special}
    byte_tokens = {name: token for name, token in names.items() if _BYTE_NAME.fullmatch(name)}
    # With byte fallback, all 256 byte tokens exist. A vocabulary that has only some has ordinary tokens of such names.
    has_byte_fallback = len(byte_tokens) == _NUM_BYTES
    context = _find_letter(tokenizer, names)
    context_length = len(tokenizer.decode(context, skip_special_tokens=False))
    found = [b""] * (max(names.values(), default=-1) + 1)
    for name, token in names.items():
        if token in special:
            continue
        if has_byte_fallback and name in byte_tokens:
            found[token] = bytes([int(name[3:5], 16)])
        else:
            text = tokenizer.decode([*context, token], skip_special_tokens=False)
            found[token] = text[context_length:].encode()
    return found


def _find_letter(tokenizer: Tokenizer, names: dict[str, int]) -> list[int]:
    """Return a token that decodes to a plain letter, in a list; empty if the vocabulary has none."""
    for letter in "aeiosnrt":
        token = names.get(letter)
        if token is not None and tokenizer.decode([token]) == letter:
            return [token]
    return []
