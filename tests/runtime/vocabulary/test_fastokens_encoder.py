"""fastokens is used only if it encodes as tokenizers does."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import write_tokenizer

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


def _load_demo() -> Any:
    encode = choose_encoder("fastokens", DEMO, TOKENIZER)
    assert "load_fastokens_encoder" in encode.__qualname__, (
        "fastokens encodes the demo model's probe texts differently"
    )
    return encode


FAST = _load_demo()


def chosen(caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """Return the level and the text of the only event."""
    [record] = caplog.records
    return record.levelno, record.getMessage()


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skiff")


def test_auto_chooses_fastokens_where_it_agrees(caplog: pytest.LogCaptureFixture) -> None:
    encode = choose_encoder("auto", DEMO, TOKENIZER)
    assert np.array_equal(encode("a pod", False), FAST("a pod", False))
    assert "load_fastokens_encoder" in encode.__qualname__
    level, text = chosen(caplog)
    assert level == logging.INFO and text.startswith("tokenizer_backend_chosen backend=fastokens reason=")


def test_tokenizers_is_used_on_request(caplog: pytest.LogCaptureFixture) -> None:
    assert "reference_encoder" in choose_encoder("tokenizers", DEMO, TOKENIZER).__qualname__
    assert chosen(caplog)[1] == "tokenizer_backend_chosen backend=tokenizers reason=--tokenizer-backend"


@pytest.mark.parametrize(("backend", "level"), [("auto", logging.INFO), ("fastokens", logging.WARNING)])
def test_tokenizer_that_fastokens_encodes_differently_is_rejected(
    backend: TokenizerBackend, level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    other = tmp_path / "other.json"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["merges"] = saved["model"]["merges"][: len(saved["model"]["merges"]) // 2]
    other.write_text(json.dumps(saved))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert "reference_encoder" in choose_encoder(backend, other, tokenizer).__qualname__
    found, text = chosen(caplog)
    assert found == level and "backend=tokenizers" in text and "differently" in text


def test_tokenizer_that_fastokens_cannot_read_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert "reference_encoder" in choose_encoder("auto", path, TOKENIZER).__qualname__
    assert "fastokens cannot read this tokenizer" in chosen(caplog)[1]


def test_missing_package_is_an_error_only_where_it_was_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # makes the import fail
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        choose_encoder("fastokens", DEMO, TOKENIZER)
    assert "reference_encoder" in choose_encoder("auto", DEMO, TOKENIZER).__qualname__
    assert "backend=tokenizers" in chosen(caplog)[1] and "not installed" in chosen(caplog)[1]
