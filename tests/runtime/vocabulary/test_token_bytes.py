"""The bytes of tokens, joined, are the bytes of the text; special tokens and padding write nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_tokenizer import write_piece_tokenizer
from tiny_config import write_config
from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info, token_bytes
from skiff_runtime.models.config import read_model_config
from skiff_runtime.vocabulary.encoder import load_tokenizer

PADDED = 500


@pytest.mark.parametrize("write", [write_tokenizer, write_piece_tokenizer])
def test_joined_bytes_are_the_text(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    written = token_bytes(tmp_path / "tokenizer.json", PADDED)
    assert len(written) == PADDED

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.one_of(st.sampled_from("ab .,\n🙂é▁<0x>"), st.characters(codec="utf-8")), max_size=20))
    def check(text: str) -> None:
        ids = tokenizer.encode("x" + text, add_special_tokens=False).ids
        joined = b"".join(written[token] for token in ids).removeprefix(b" ")
        assert joined.decode() == tokenizer.decode(ids, skip_special_tokens=True)

    check()


def test_special_tokens_and_padding_are_never_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_config(tmp_path)
    vocabulary = read_tokenizer_info(read_model_config(tmp_path))
    assert vocabulary.vocab_size == VOCAB_SIZE
    assert vocabulary.stop_token_ids == [EOS_ID]
    assert BOS_ID in vocabulary.special_token_ids
    assert vocabulary.decoded_vocab[BOS_ID] == b""


def test_a_vocabulary_smaller_than_the_tokenizer(tmp_path: Path) -> None:
    """Some checkpoints know fewer tokens than their tokenizer."""
    write_tokenizer(tmp_path)
    assert len(token_bytes(tmp_path / "tokenizer.json", 300)) == 300
