"""Text increments add up to what decoding all tokens at once gives, and never show half a character."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from piece_tokenizer import write_piece_tokenizer
from tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer, decoders, models

from skiff_runtime.errors import ModelError
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.decode_stream import Decoder, DecodeStream, WindowDecoder
from skiff_runtime.vocabulary.encoder import load_tokenizer

TRICKY = st.text(
    alphabet=st.one_of(st.sampled_from("ab .,\n🙂🚀👩\u200d👧東京é\u0301ß▁"), st.characters(codec="utf-8")),
    max_size=40,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Decoder]:
    directory = tmp_path_factory.mktemp("bytes")
    write_tokenizer(directory)
    decoder = read_byte_level_decoder(directory / "tokenizer.json")
    assert decoder is not None
    return load_tokenizer(directory / "tokenizer.json"), decoder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("pieces")
    write_piece_tokenizer(directory)
    assert read_byte_level_decoder(directory / "tokenizer.json") is None
    return load_tokenizer(directory / "tokenizer.json")


def increments(stream: DecodeStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary(
    byte_level: tuple[Tokenizer, Decoder], data: st.DataObject, skip: bool
) -> None:
    tokenizer, decoder = byte_level
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50))
    parts = increments(decoder.stream(skip_special_tokens=skip), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=TRICKY)
@example(text="🙂<|end|>")
def test_no_increment_shows_half_a_character(byte_level: tuple[Tokenizer, Decoder], text: str) -> None:
    """Of any text, one that names a special token among them."""
    tokenizer, decoder = byte_level
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = increments(decoder.stream(skip_special_tokens=False), ids)
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_window_of_a_byte_level_vocabulary(
    byte_level: tuple[Tokenizer, Decoder], data: st.DataObject, skip: bool
) -> None:
    """The general method agrees with the table wherever the bytes are well formed."""
    tokenizer, _ = byte_level
    ids = tokenizer.encode(data.draw(TRICKY)).ids
    parts = increments(WindowDecoder(tokenizer).stream(skip_special_tokens=skip), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=TRICKY)
def test_pieces_with_byte_fallback(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text, add_special_tokens=False).ids
    parts = increments(WindowDecoder(pieces).stream(skip_special_tokens=True), ids)
    assert "".join(parts) == pieces.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_whole_pieces(pieces: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(259, pieces.get_vocab_size() - 1) | st.just(1), max_size=40))
    parts = increments(WindowDecoder(pieces).stream(skip_special_tokens=True), ids)
    assert "".join(parts) == pieces.decode(ids)


def test_a_window_stays_short(pieces: Tokenizer) -> None:
    """Malformed bytes without end, and silent tokens without end, must not make each token dearer."""
    for endless in (3 + 0xFF, 1):
        stream = WindowDecoder(pieces).stream(skip_special_tokens=True)
        for _ in range(200):
            stream.push(endless)
        assert len(stream._ids) < 32


def test_ids_beyond_the_vocabulary_write_nothing(byte_level: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, decoder = byte_level
    assert (
        increments(decoder.stream(skip_special_tokens=True), [10**6, tokenizer.get_vocab_size()]) == [""] * 3
    )


@pytest.mark.parametrize("content", ["é", "<|x y|>", "Ġ", "東"])
def test_added_tokens_decode_as_the_tokenizer_does(tmp_path: Path, content: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_tokens([content])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = read_byte_level_decoder(tmp_path / "tokenizer.json")
    assert decoder is not None
    assert "".join(increments(decoder.stream(skip_special_tokens=True), [0])) == tokenizer.decode([0])


def test_a_malformed_tokenizer_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    for load in (read_byte_level_decoder, load_tokenizer):
        with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer"):
            load(path)
