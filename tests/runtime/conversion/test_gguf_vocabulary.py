"""Tokenizers of GGUF files: each encodes and decodes like the tokenizer that the file was made of."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_tokenizers import write_sentencepiece
from gguf import GGUFWriter
from gguf_bytes import ARRAY, STRING, GgufBytes
from gguf_models import make_gguf
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer

from skiff_runtime.conversion.gguf_vocabulary import PRE_TOKENIZERS, GgufVocabulary
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import ModelError
from skiff_runtime.vocabulary.probe_texts import PROBE_TEXTS
from skiff_runtime.vocabulary.tokenizer_files import TokenizerFiles, read_tokenizer_files

WORDS = st.sampled_from(
    ["boat", "the", " ", "  ", "\n", "12", "Köln", "日本", "🙂", "\x00", "é", ".", "<|user|>"]
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map("".join))
PIECES_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>")


def convert(path: Path, cache: Path) -> tuple[Tokenizer, TokenizerFiles]:
    directory = find_or_convert_tokenizer(path, [cache])
    assert directory.is_relative_to(cache)
    files = read_tokenizer_files(path, directory)
    return Tokenizer.from_file(str(files.tokenizer)), files


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer, TokenizerFiles]:
    """The original, the converted tokenizer, and its files."""
    directory = tmp_path_factory.mktemp("byte_level")
    converted, files = convert(make_gguf(directory), directory / "cache")
    return Tokenizer.from_file(str(directory / "hf" / "tokenizer.json")), converted, files


class TestByteLevel:
    @given(text=TEXTS)
    @example("a  2 and 2024")
    @example("")
    def test_converted_tokenizer_encodes_and_decodes_like_the_original(
        self, byte_level: tuple[Tokenizer, Tokenizer, TokenizerFiles], text: str
    ) -> None:
        original, converted, _ = byte_level
        for special in (True, False):
            ids = converted.encode(text, add_special_tokens=special).ids
            assert ids == original.encode(text, add_special_tokens=special).ids
        assert converted.decode(ids) == original.decode(ids)

    def test_template_and_special_tokens_come_from_the_metadata(
        self, byte_level: tuple[Tokenizer, Tokenizer, TokenizerFiles]
    ) -> None:
        files = byte_level[2]
        assert files.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        assert files.template is not None and files.template.startswith("{{ bos_token }}")

    def test_result_is_kept_by_the_header(self, tmp_path: Path) -> None:
        path = make_gguf(tmp_path)
        first = find_or_convert_tokenizer(path, [tmp_path / "cache"])
        changed = first.stat().st_mtime_ns
        assert find_or_convert_tokenizer(path, [tmp_path / "cache"]) == first
        assert first.stat().st_mtime_ns == changed

        def set_no_bos(writer: GGUFWriter) -> None:
            del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
            writer.add_add_bos_token(False)

        other = make_gguf(tmp_path / "other", edit=set_no_bos)
        tokenizer, _ = convert(other, tmp_path / "cache")
        assert tokenizer.encode("boat").ids == tokenizer.encode("boat", add_special_tokens=False).ids

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("gpt-2", ["a", " ", " 2024", "\n", " it", "'s", "!?"]),
            ("smollm", ["a", "  ", "2", "0", "2", "4", "\n", " it", "'s", "!?"]),
            ("qwen2", ["a", " ", " ", "2", "0", "2", "4", "\n", " it", "'s", "!?"]),
            ("llama-bpe", ["a", " ", " ", "202", "4", "\n", " it", "'s", "!?"]),
            ("tekken", ["a", " ", " ", "2", "0", "2", "4", "\n", " it", "'s", "!?"]),
        ],
    )
    def test_text_is_split_as_by_the_named_pre_tokenizer(
        self, tmp_path: Path, name: str, words: list[str]
    ) -> None:
        tokenizer = GgufVocabulary(write_vocabulary(tmp_path, pre=name)).build_byte_level()
        text = "a  2024\n it's!?"
        pre_tokenizer: Any = tokenizer.pre_tokenizer
        assert [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)] == words

    def test_families_differ_in_bos_normalization_and_merges(self) -> None:
        assert {name for name, each in PRE_TOKENIZERS.items() if each.adds_bos} == {
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "tekken",
        }
        assert {name for name, each in PRE_TOKENIZERS.items() if each.nfc} == {"qwen2"}


def write_vocabulary(directory: Path, **changes: Any) -> Path:
    """Write a file with a vocabulary of three tokens."""
    entries: dict[str, tuple[int, Any]] = {
        "model": (STRING, "gpt2"),
        "pre": (STRING, "gpt-2"),
        "tokens": (ARRAY, (STRING, ["a", "b", "ab"])),
        "merges": (ARRAY, (STRING, ["a b"])),
    }
    for name, value in changes.items():
        entries[name] = (STRING, value) if isinstance(value, str) else (ARRAY, value)
    path = directory / "model.gguf"
    path.write_bytes(
        GgufBytes([(f"tokenizer.ggml.{name}", *entry) for name, entry in entries.items()]).build()
    )
    return path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "t5"}, "'tokenizer.ggml.model' 't5' is not supported; supported are 'gpt2' and 'llama'"),
        ({"pre": "default"}, "'tokenizer.ggml.pre' 'default' is not supported; supported are 'gpt-2'"),
        ({"merges": (STRING, ["a b c"])}, "'tokenizer.ggml.merges' must be pairs of tokens"),
        ({"tokens": (STRING, [])}, "'tokenizer.ggml.tokens' must be as many as"),
        ({"tokens": (5, [1, 2])}, "'tokenizer.ggml.tokens' must be an array of str"),
        ({"token_type": (5, [1, 1])}, "'tokenizer.ggml.tokens' must be as many as"),
        ({"tokens": (STRING, ["a", "b", "ab", "a"])}, "token 0 is 'a', but None after the conversion"),
    ],
)
def test_unusable_vocabulary_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = write_vocabulary(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        find_or_convert_tokenizer(path, [tmp_path / "cache"])
    assert problem in str(caught.value)
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


def write_pieces(directory: Path, edit: Callable[[GGUFWriter], None] | None = None, **options: Any) -> Path:
    """Write a GGUF file with a SentencePiece vocabulary, as llama.cpp's converter does, and ``tokenizer.model`` beside it."""
    source = directory / "tokenizer.model"
    write_sentencepiece(source, control_symbols=["<|im_start|>"], **options)
    proto = sentencepiece_model_pb2.ModelProto.FromString(source.read_bytes())  # type: ignore[attr-defined]
    writer = GGUFWriter(directory / "pieces.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return directory / "pieces.gguf"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[SentencePieceProcessor, Tokenizer]:
    directory = tmp_path_factory.mktemp("pieces")
    converted, _ = convert(write_pieces(directory), directory / "cache")
    return SentencePieceProcessor(model_file=str(directory / "tokenizer.model")), converted


class TestSentencePiece:
    @given(text=st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map("".join)))
    @example("  two blanks first")
    def test_converted_tokenizer_encodes_and_decodes_like_sentencepiece(
        self, pieces: tuple[SentencePieceProcessor, Tokenizer], text: str
    ) -> None:
        reference, converted = pieces
        if any(token in text for token in PIECES_SPECIAL):
            return
        ids = converted.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text)
        assert converted.decode(ids) == reference.decode(ids)

    def test_control_tokens_are_whole_and_bos_is_added(
        self, pieces: tuple[SentencePieceProcessor, Tokenizer]
    ) -> None:
        reference, converted = pieces
        control = reference.piece_to_id("<|im_start|>")
        assert control in converted.encode("<|im_start|>boat").ids
        assert converted.encode("boat").ids == [1, *reference.encode("boat")]

    def test_no_blank_is_added_where_the_file_says_so(self, tmp_path: Path) -> None:
        path = write_pieces(
            tmp_path, lambda writer: writer.add_add_space_prefix(False), add_dummy_prefix=False
        )
        converted, _ = convert(path, tmp_path / "cache")
        reference = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
        for text in PROBE_TEXTS:
            assert converted.encode(text, add_special_tokens=False).ids == reference.encode(text)


def test_byte_level_conversion_needs_no_transformers(tmp_path: Path) -> None:
    path, target = make_gguf(tmp_path), tmp_path / "target"
    target.mkdir()
    code = (
        "import sys; from pathlib import Path; from skiff_runtime.conversion.convert_tokenizer import convert;"
        "source, target = map(Path, sys.argv[1:]); convert(source, source, target);"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path), str(target)], timeout=60).returncode == 0
    assert (target / "tokenizer.json").is_file()
