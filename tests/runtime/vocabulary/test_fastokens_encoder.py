"""fastokens is used only if it encodes as tokenizers does."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import fastokens
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer

from skiff_runtime import demo
from skiff_runtime.config import TokenizerBackend
from skiff_runtime.errors import ConfigError
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.fastokens_encoder import choose_encoder, reference_encoder

DEMO = demo.DIRECTORY / "tokenizer.json"
TOKENIZER = load_tokenizer(DEMO)
ADDED = sorted(token.content for token in TOKENIZER.get_added_tokens_decoder().values())
TEXTS = st.lists(
    st.sampled_from([*ADDED, " ", "\n", "'s", "12", "ing"])
    | st.text(st.characters(codec="utf-8"), max_size=12),
    max_size=12,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_ids_equal_those_of_tokenizers(text: str, special: bool) -> None:
    assert np.array_equal(FAST(text, special), reference_encoder(TOKENIZER)(text, special))


FAST = choose_encoder("fastokens", DEMO, TOKENIZER)


def choose(
    caplog: pytest.LogCaptureFixture, backend: TokenizerBackend, path: Path, tokenizer: Tokenizer = TOKENIZER
) -> tuple[str, str]:
    """Return the level and the text of the only event of a choice, which must encode as ``tokenizer`` does."""
    caplog.set_level(logging.INFO, "skiff")
    encode = choose_encoder(backend, path, tokenizer)
    assert np.array_equal(encode("a pod", False), reference_encoder(tokenizer)("a pod", False))
    [record] = caplog.records
    return record.levelname, record.getMessage()


@pytest.mark.parametrize("backend", ["auto", "fastokens"])
def test_fastokens_is_chosen_where_it_agrees(
    backend: TokenizerBackend, caplog: pytest.LogCaptureFixture
) -> None:
    level, text = choose(caplog, backend, DEMO)
    assert level == "INFO" and text.startswith("tokenizer_backend_chosen backend=fastokens reason=")


def test_tokenizers_is_used_on_request(caplog: pytest.LogCaptureFixture) -> None:
    _, text = choose(caplog, "tokenizers", DEMO)
    assert text == "tokenizer_backend_chosen backend=tokenizers reason=--tokenizer-backend"


@pytest.mark.parametrize(("backend", "level"), [("auto", "INFO"), ("fastokens", "WARNING")])
def test_tokenizer_that_fastokens_encodes_differently_is_rejected(
    backend: TokenizerBackend, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    other = tmp_path / "other.json"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["merges"] = saved["model"]["merges"][: len(saved["model"]["merges"]) // 2]
    other.write_text(json.dumps(saved))
    found, text = choose(caplog, backend, other, load_tokenizer(tmp_path / "tokenizer.json"))
    assert found == level and "backend=tokenizers" in text and "differently" in text


def test_tokenizer_that_fastokens_cannot_read_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert "fastokens cannot read this tokenizer" in choose(caplog, "auto", path)[1]


def test_missing_package_is_an_error_only_where_it_was_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # makes the import fail
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        choose_encoder("fastokens", DEMO, TOKENIZER)
    level, text = choose(caplog, "auto", DEMO)
    assert level == "INFO" and "backend=tokenizers" in text and "not installed" in text


class PanicException(BaseException):
    """A panic of Rust code."""


class FragileTokenizer:
    """fastokens with a fault that the probe texts do not show."""

    def __init__(self, path: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_file(path)

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> object:
        if "fragile" in texts[0]:
            raise PanicException("index out of bounds")
        return self._tokenizer.encode_batch_flat(texts, add_special_tokens)


def test_panic_of_fastokens_neither_fails_the_request_nor_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=FragileTokenizer))
    monkeypatch.setitem(sys.modules, "fastokens", module)
    encode = choose_encoder("fastokens", DEMO, TOKENIZER)
    assert np.array_equal(encode("a fragile pod", True), reference_encoder(TOKENIZER)("a fragile pod", True))
    assert 'fastokens_failed error="index out of bounds" characters=13' in caplog.text
