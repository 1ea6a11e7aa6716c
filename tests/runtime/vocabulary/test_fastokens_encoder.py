"""Encoding by fastokens: the same ids as tokenizers, or not used at all."""

import builtins
import json
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
def test_it_gives_the_same_ids(text: str, special: bool) -> None:
    fast = FAST(text, special)
    assert np.array_equal(fast, reference_encoder(TOKENIZER)(text, special))


def _trusted() -> Any:
    found = load_fastokens_encoder(DEMO, TOKENIZER)
    assert found is not None, "it is not trusted with the demo model"
    return found


FAST = _trusted()


def test_a_tokenizer_that_it_encodes_differently_is_left_to_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    other = tmp_path / "other.json"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["merges"] = saved["model"]["merges"][: len(saved["model"]["merges"]) // 2]
    other.write_text(json.dumps(saved))
    assert load_fastokens_encoder(other, load_tokenizer(tmp_path / "tokenizer.json")) is None
    assert "fastokens_rejected" in caplog.text


def test_one_that_it_cannot_read_likewise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert load_fastokens_encoder(path, TOKENIZER) is None
    assert "cannot read this tokenizer" in caplog.text


def test_without_the_package_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "fastokens":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        load_fastokens_encoder(DEMO, TOKENIZER)
