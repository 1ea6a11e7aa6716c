"""The vocabulary in xgrammar's form, and the import of xgrammar itself."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_config import write_config
from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.models.config import read_model_config


def test_special_tokens_are_never_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_config(tmp_path)
    vocabulary = read_tokenizer_info(read_model_config(tmp_path))
    assert vocabulary.vocab_size == VOCAB_SIZE
    assert vocabulary.stop_token_ids == [EOS_ID]
    assert BOS_ID in vocabulary.special_token_ids
    assert vocabulary.decoded_vocab[BOS_ID] == b""


@pytest.mark.parametrize("module", ["tokenizer_info", "matcher"])
def test_xgrammar_uses_the_unmodified_classes_of_transformers(module: str) -> None:
    code = (
        f"import skiff_runtime.grammar.{module}\nimport transformers, xgrammar.tokenizer_info as info\n"
        "assert info.PreTrainedTokenizerFast is transformers.PreTrainedTokenizerFast"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
