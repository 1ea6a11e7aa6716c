"""xgrammar comes without transformers, unless that is there already."""

import subprocess
import sys

import pytest

COMPILES = """
grammar = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([b"a", b"b", b""], stop_token_ids=[2])).compile_regex("ab")
matcher = xgrammar.GrammarMatcher(grammar)
assert matcher.accept_token(0) and not matcher.accept_token(0)
"""


@pytest.mark.parametrize(
    "before, held",
    [
        ("", '"transformers" not in sys.modules'),
        ("import transformers", 'sys.modules["transformers"] is transformers'),
    ],
    ids=["alone", "beside"],
)
def test_import(before: str, held: str) -> None:
    code = (
        f"import sys\n{before}\nfrom skiff_runtime.grammar.library import xgrammar\nassert {held}\n{COMPILES}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_can_be_imported_after_it() -> None:
    code = "from skiff_runtime.grammar.library import xgrammar\nfrom transformers import PreTrainedTokenizerFast as t\nprint(t.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith("transformers.")
