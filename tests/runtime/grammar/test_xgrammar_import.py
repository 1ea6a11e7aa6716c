"""xgrammar is imported as it is: the names that it takes from transformers are transformers' own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["vocabulary", "matcher"])
def test_xgrammar_holds_the_real_classes_of_transformers(module: str) -> None:
    code = (
        f"import skiff_runtime.grammar.{module}\nimport transformers, xgrammar.tokenizer_info as held\n"
        "assert held.PreTrainedTokenizerFast is transformers.PreTrainedTokenizerFast"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
