"""Text increments add up to the text of decoding all tokens at once, and never show half a character."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from piece_tokenizer import write_piece_tokenizer
from tiny_tokenizer import EOS_ID, write_tokenizer
from tokenizers import Tokenizer, decoders, models

from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.decode_stream import DecodeStream, TokenDecoder, WindowDecoder
from skiff_runtime.vocabulary.encoder import load_tokenizer

TRICKY = st.text(
    alphabet=st.one_of(st.sampled_from("ab .,\n🙂🚀👩\u200d👧東京é\u0301ß▁"), st.characters(codec="utf-8")),
    max_size=40,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TokenDecoder]:
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
def test_any_ids_of_a_byte_level_vocabulary_decode_as_at_once(
    byte_level: tuple[Tokenizer, TokenDecoder], data: st.DataObject, skip: bool
) -> None:
    tokenizer, decoder = byte_level
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50))
    parts = increments(decoder.stream(skip_special_tokens=skip), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=TRICKY)
@example(text="🙂<|end|>")
def test_no_increment_shows_half_a_character(byte_level: tuple[Tokenizer, TokenDecoder], text: str) -> None:
    """Texts may contain the name of a special token."""
    tokenizer, decoder = byte_level
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = increments(decoder.stream(skip_special_tokens=False), ids)
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_window_stream_agrees_on_well_formed_byte_level_text(
    byte_level: tuple[Tokenizer, TokenDecoder], data: st.DataObject, skip: bool
) -> None:
    tokenizer, _ = byte_level
    ids = tokenizer.encode(data.draw(TRICKY)).ids
    parts = increments(WindowDecoder(tokenizer).stream(skip_special_tokens=skip), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=TRICKY)
def test_pieces_with_byte_fallback_decode_as_at_once(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text, add_special_tokens=False).ids
    parts = increments(WindowDecoder(pieces).stream(skip_special_tokens=True), ids)
    assert "".join(parts) == pieces.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_whole_pieces_decode_as_at_once(pieces: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(259, pieces.get_vocab_size() - 1) | st.just(1), max_size=40))
    parts = increments(WindowDecoder(pieces).stream(skip_special_tokens=True), ids)
    assert "".join(parts) == pieces.decode(ids)


def test_window_stays_short(pieces: Tokenizer) -> None:
    """Endless malformed bytes or endless skipped tokens must not make later tokens slower."""
    for repeated in (3 + 0xFF, 1):
        stream = WindowDecoder(pieces).stream(skip_special_tokens=True)
        for _ in range(200):
            stream.push(repeated)
        assert len(stream._ids) < 32


def test_ids_outside_the_vocabulary_have_no_text(byte_level: tuple[Tokenizer, TokenDecoder]) -> None:
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


def test_token_bytes_of_a_byte_level_vocabulary(byte_level: tuple[Tokenizer, TokenDecoder]) -> None:
    tokenizer, decoder = byte_level
    text = "Grüße 🙂 boat"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(decoder.token_bytes, tokens)) == text.encode()
    assert decoder.token_bytes(EOS_ID) == b"<|end|>"
    assert decoder.token_bytes(-1) == decoder.token_bytes(10**6) == b""


def test_token_bytes_of_pieces_with_byte_fallback(pieces: Tokenizer) -> None:
    decoder = WindowDecoder(pieces)
    text = "a b 🙂é boat"
    tokens = pieces.encode(text, add_special_tokens=False).ids
    for _ in range(2):
        assert b"".join(map(decoder.token_bytes, tokens)).decode().removeprefix(" ") == text
    special = pieces.token_to_id("<s>")
    assert special is not None
    assert decoder.token_bytes(special) == b"<s>"
    assert decoder.token_bytes(-1) == decoder.token_bytes(10**6) == b""
