"""fastokens is used only if it encodes as tokenizers does."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import write_tokenizer

from skiff_runtime import demo
from skiff_runtime.errors import ConfigError
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.fastokens_encoder import load_fastokens_encoder, reference_encoder

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
    encode = load_fastokens_encoder(DEMO, TOKENIZER)
    assert encode is not None, "fastokens encodes the demo model's probe texts differently"
    return encode


FAST = _load_demo()


def test_tokenizer_that_fastokens_encodes_differently_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    other = tmp_path / "other.json"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["merges"] = saved["model"]["merges"][: len(saved["model"]["merges"]) // 2]
    other.write_text(json.dumps(saved))
    assert load_fastokens_encoder(other, load_tokenizer(tmp_path / "tokenizer.json")) is None
    assert "fastokens_rejected" in caplog.text


def test_tokenizer_that_fastokens_cannot_read_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert load_fastokens_encoder(path, TOKENIZER) is None
    assert "cannot read this tokenizer" in caplog.text


def test_missing_package_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # makes the import fail
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        load_fastokens_encoder(DEMO, TOKENIZER)
