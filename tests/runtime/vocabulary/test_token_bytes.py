"""The bytes of tokens, joined, are the bytes of the text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_tokenizer import write_piece_tokenizer
from tiny_tokenizer import write_tokenizer

from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.token_bytes import read_token_bytes

PADDED_SIZE = 500


@pytest.mark.parametrize("write", [write_tokenizer, write_piece_tokenizer])
def test_joined_bytes_are_the_text(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    token_bytes = read_token_bytes(tmp_path / "tokenizer.json", PADDED_SIZE)
    assert len(token_bytes) == PADDED_SIZE

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.one_of(st.sampled_from("ab .,\n🙂é▁<0x>"), st.characters(codec="utf-8")), max_size=20))
    def check(text: str) -> None:
        ids = tokenizer.encode("x" + text, add_special_tokens=False).ids
        joined = b"".join(token_bytes[token] for token in ids).removeprefix(b" ")
        assert joined.decode() == tokenizer.decode(ids, skip_special_tokens=True)

    check()


def test_vocabulary_smaller_than_the_tokenizer_is_cut(tmp_path: Path) -> None:
    """Some models have fewer embeddings than their tokenizer has tokens."""
    write_tokenizer(tmp_path)
    assert len(read_token_bytes(tmp_path / "tokenizer.json", 300)) == 300
