"""Byte-level vocabularies (GPT-2's scheme), read from tokenizer.json without building the tokenizer.

The merges, which are most of the file, are skipped. This keeps the detokenizer process small.
"""

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from skiff_runtime.errors import ModelError
from skiff_runtime.vocabulary.decode_stream import ByteLevelDecoder, Piece

_BYTE_LEVEL: Final = "ByteLevel"
_SEQUENCE: Final = "Sequence"


class _Model(Struct):
    vocab: Any = None


class _AddedToken(Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(Struct):
    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


def read_byte_level_decoder(path: Path) -> ByteLevelDecoder | None:
    """Read ``path``, a tokenizer.json. Return None if its vocabulary is not byte-level. Raises ``ModelError``."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    vocab = file.model.vocab
    if not isinstance(vocab, dict) or not _is_byte_level(file.decoder):
        return None
    ids = [*vocab.values(), *(token.id for token in file.added_tokens)]
    pieces: list[Piece] = [""] * (max(ids, default=-1) + 1)
    for content, token in vocab.items():
        pieces[token] = _decode_name(content)
    for added in file.added_tokens:
        pieces[added.id] = _decode_name(added.content)
    return ByteLevelDecoder(pieces, tuple(token.id for token in file.added_tokens if token.special))


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == _SEQUENCE:
        members = decoder.get("decoders")
        return isinstance(members, list) and len(members) == 1 and _is_byte_level(members[0])
    return decoder.get("type") == _BYTE_LEVEL


def _decode_name(content: str) -> Piece:
    """Decode the name of a token, in which each letter represents a byte.

    An added token may have letters that represent no byte; its name is its text.
    """
    try:
        data = bytes([_BYTE_OF[character] for character in content])
    except KeyError:
        return content
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _map_letters_to_bytes() -> dict[str, int]:
    """Return GPT-2's map from letters to bytes: a printable byte is its own letter, the others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final = _map_letters_to_bytes()
