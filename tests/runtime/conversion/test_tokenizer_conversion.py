"""Tokenizers of SentencePiece, tiktoken and tekken are converted once to a tokenizer.json that encodes the same."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiktoken
from foreign_tokenizers import (
    TIKTOKEN_SPECIAL,
    name_special_tokens,
    tiktoken_ranks,
    write_sentencepiece,
    write_tekken,
    write_tiktoken,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import ModelError
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

WORDS = st.sampled_from(["boat", "the", " ", "  ", "\n", "\t", "12", "Köln", "日本", "🙂", "\x00", "é", "."])
TEXTS = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map("".join))


def write_model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512})
    )
    return path


def convert(model: Path, cache: Path) -> Tokenizer:
    directory = find_or_convert_tokenizer(model, [cache])
    assert directory.is_relative_to(cache)
    return Tokenizer.from_file(str(read_tokenizer_files(model, directory).tokenizer))


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[SentencePieceProcessor, Tokenizer]:
    model = write_model(tmp_path_factory.mktemp("pieces") / "model")
    write_sentencepiece(model / "tokenizer.model")
    converted = convert(model, model.parent / "cache")
    return SentencePieceProcessor(model_file=str(model / "tokenizer.model")), converted


@pytest.fixture(scope="module")
def tiktoken_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiktoken.Encoding, Tokenizer]:
    model = write_model(tmp_path_factory.mktemp("ranks") / "model")
    write_tiktoken(model / "any_name.tiktoken")
    name_special_tokens(model)
    plain = tiktoken.Encoding(
        "tiny", pat_str=TikTokenConverter().pattern, mergeable_ranks=tiktoken_ranks(), special_tokens={}
    )
    return plain, convert(model, model.parent / "cache")


class TestSentencePiece:
    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    @example("  two blanks first")
    @example("")
    def test_converted_tokenizer_encodes_and_decodes_like_sentencepiece(
        self, sentencepiece_pair: tuple[SentencePieceProcessor, Tokenizer], text: str
    ) -> None:
        pieces, converted = sentencepiece_pair
        ids = converted.encode(text, add_special_tokens=False).ids
        assert ids == pieces.encode(text)
        assert converted.decode(ids) == pieces.decode(ids)

    def test_begin_token_is_added_once(
        self, sentencepiece_pair: tuple[SentencePieceProcessor, Tokenizer]
    ) -> None:
        pieces, converted = sentencepiece_pair
        assert converted.encode("boat").ids == [pieces.bos_id(), *pieces.encode("boat")]

    def test_user_defined_pieces_are_not_split(self, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        write_sentencepiece(model / "tokenizer.model", user_defined_symbols=["<tool>", "<boat>"])
        declared = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False}
        (model / "tokenizer_config.json").write_text(json.dumps(declared))
        converted = convert(model, tmp_path / "cache")
        pieces = SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
        whole = {pieces.piece_to_id("<tool>"), pieces.piece_to_id("<boat>")}
        assert [token for token in converted.encode("a<tool>b <boat>").ids if token in whole] == sorted(whole)
        assert converted.encode("the boat").ids == pieces.encode(
            "the boat"
        )  # no begin token, as tokenizer_config.json says


class TestTiktoken:
    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def test_converted_tokenizer_encodes_like_tiktoken(
        self, tiktoken_pair: tuple[tiktoken.Encoding, Tokenizer], text: str
    ) -> None:
        plain, converted = tiktoken_pair
        ids = converted.encode(text, add_special_tokens=False).ids
        assert ids == plain.encode_ordinary(text)
        assert converted.decode(ids) == text

    def test_special_tokens_keep_their_ids(self, tiktoken_pair: tuple[tiktoken.Encoding, Tokenizer]) -> None:
        plain, converted = tiktoken_pair
        begin, _, turn = TIKTOKEN_SPECIAL
        first = len(tiktoken_ranks())
        assert converted.encode(f"boat{turn}").ids == [first, *plain.encode_ordinary("boat"), first + 2]
        assert converted.token_to_id(begin) == first

    def test_unnamed_special_tokens_are_refused(self, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        write_tiktoken(model / "tokenizer.model")
        with pytest.raises(
            ModelError, match=r"tokenizer\.model cannot be converted.*names the special tokens"
        ):
            find_or_convert_tokenizer(model, [tmp_path / "cache"])


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_converted_tekken_encodes_bytes_exactly(
    tekken: tuple[dict[bytes, int], Tokenizer], text: str
) -> None:
    ids, converted = tekken
    tokens = {number: token for token, number in ids.items()}
    encoded = converted.encode(text, add_special_tokens=False).ids
    assert b"".join(tokens[number] for number in encoded) == text.encode()


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[bytes, int], Tokenizer]:
    model = write_model(tmp_path_factory.mktemp("tekken") / "model")
    ids = write_tekken(model / "tekken.json")
    return ids, convert(model, model.parent / "cache")


class TestConversion:
    def test_conversion_runs_once_and_leaves_the_model_directory_unchanged(self, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        write_sentencepiece(model / "tokenizer.model")
        (tmp_path / "file").touch()
        before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
        first = find_or_convert_tokenizer(model, [tmp_path / "file", tmp_path / "cache"])
        written = (first / "tokenizer.json").stat().st_mtime_ns
        assert find_or_convert_tokenizer(model, [tmp_path / "cache"]) == first
        assert (first / "tokenizer.json").stat().st_mtime_ns == written
        assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
        assert list(first.parent.iterdir()) == [first]  # no scratch directory is left
        special = read_tokenizer_files(model, first).special_tokens
        assert (special["bos_token"], special["eos_token"]) == ("<s>", "</s>")
        # A model with other files needs another conversion, for which no directory is writable.
        assert find_or_convert_tokenizer(model, [tmp_path / "file", tmp_path / "cache"]) == first
        (model / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        with pytest.raises(ModelError, match=r"make a --download-dir writable"):
            find_or_convert_tokenizer(model, [tmp_path / "file"])

    def test_model_with_its_own_tokenizer_json_is_not_converted(self, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        (model / "tokenizer.model").write_bytes(b"not read")
        (model / "tokenizer.json").write_text("{}")
        assert find_or_convert_tokenizer(model, [tmp_path / "cache"]) == model
        (model / "tokenizer.json").unlink()
        (model / "tokenizer.model").unlink()
        assert find_or_convert_tokenizer(model, [tmp_path / "cache"]) == model

    @pytest.mark.parametrize("content", [b"", b"\0\1\2 nothing", b"QQ== 0\nnonsense\n"])
    def test_malformed_vocabulary_is_named(self, tmp_path: Path, content: bytes) -> None:
        model = write_model(tmp_path / "model")
        (model / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"no tokenizer\.json, and tokenizer\.model cannot be converted"):
            find_or_convert_tokenizer(model, [tmp_path / "cache"])
        assert not any((tmp_path / "cache").rglob("tokenizer.json"))

    @pytest.mark.parametrize(
        ("module", "package"), [("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")]
    )
    def test_missing_package_is_named(self, tmp_path: Path, module: str, package: str) -> None:
        model = write_model(tmp_path / "model")
        write_sentencepiece(model / "tokenizer.model")
        code = (
            f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = {[str(model), str(model / 'tokenizer.model'), str(tmp_path)]!r}\n"
            "from skiff_runtime.conversion.convert_tokenizer import main; sys.exit(main())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert (
            done.stderr.strip().splitlines()[-1] == f"this needs the package {package}: pip install {package}"
        )

    def test_code_of_the_repository_is_not_run(self, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        write_sentencepiece(model / "tokenizer.model")
        (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
        (model / "tokenizer_config.json").write_text(
            json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"})
        )
        started = time.monotonic()
        try:
            find_or_convert_tokenizer(model, [tmp_path / "cache"])
        except ModelError:
            assert time.monotonic() - started < 60  # it does not wait for a confirmation
        assert not (tmp_path / "ran").exists()

    def test_parent_process_does_not_import_transformers(self) -> None:
        code = "import sys, skiff_runtime.conversion.tokenizer_json, skiff_runtime.processes.resolve; sys.exit(bool({'transformers', 'sentencepiece', 'torch'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
