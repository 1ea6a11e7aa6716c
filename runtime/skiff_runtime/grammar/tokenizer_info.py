"""The model's vocabulary as xgrammar needs it: the bytes that each token writes, and the tokens that end an answer.

The compiler process and every engine build it from the same files, for a grammar is compiled for exactly one vocabulary.
"""

import re
from pathlib import Path
from typing import Final

import xgrammar
from tokenizers import Tokenizer

from skiff_runtime.models.config import ModelConfig
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

_BYTE_NAME: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ALL_BYTES: Final = 256


def read_tokenizer_info(model: ModelConfig) -> xgrammar.TokenizerInfo:
    """What xgrammar must know of the model. Raises ``ModelError``.

    A grammar constrains the text that a client sees, so special tokens are no part of any answer: they are
    never admitted, but for the end of sequence where the answer may end.
    """
    return xgrammar.TokenizerInfo(
        token_bytes(read_tokenizer_files(model.path, model.tokenizer_path).tokenizer, model.vocab_size),
        xgrammar.VocabType.RAW,
        vocab_size=model.vocab_size,
        stop_token_ids=[token for token in model.eos_token_ids if token < model.vocab_size],
    )


def token_bytes(path: Path, vocab_size: int) -> list[bytes]:
    """What each token of the model writes within a text, by the tokenizer.json in ``path``.

    Empty for special tokens and for ids that no token has (models pad their vocabulary).
    """
    decoder = read_byte_level_decoder(path)
    if decoder is None:
        written = _decoded(load_tokenizer(path))
    else:
        written = [piece.encode() if isinstance(piece, str) else piece for piece in decoder.plain]
    return (written + [b""] * (vocab_size - len(written)))[:vocab_size]


def _decoded(tokenizer: Tokenizer) -> list[bytes]:
    """By any other decoder: what a token adds to the text of another before it."""
    names = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, content in added.items() if content.special}
    spelled = {name: token for name, token in names.items() if _BYTE_NAME.fullmatch(name)}
    bytes_fall_back = len(spelled) == _ALL_BYTES
    context = _context(tokenizer, names)
    before = len(tokenizer.decode(context, skip_special_tokens=False))
    written = [b""] * (max(names.values(), default=-1) + 1)
    for name, token in names.items():
        if token in special:
            continue
        if bytes_fall_back and name in spelled:
            written[token] = bytes([int(name[3:5], 16)])
        else:
            written[token] = tokenizer.decode([*context, token], skip_special_tokens=False)[before:].encode()
    return written


def _context(tokenizer: Tokenizer, names: dict[str, int]) -> list[int]:
    """A token that writes a plain letter, whatever stands before it; none where the vocabulary has no such."""
    for letter in "aeiosnrt":
        token = names.get(letter)
        if token is not None and tokenizer.decode([token]) == letter:
            return [token]
    return []
