"""xgrammar comes without transformers, unless that is there already."""

import subprocess
import sys
from pathlib import Path

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


def test_a_version_that_wants_more_of_transformers_gets_it(tmp_path: Path) -> None:
    package = tmp_path / "xgrammar"
    package.mkdir()
    (package / "__init__.py").write_text("from . import part\nfrom transformers.utils import logging\n")
    (package / "part.py").write_text("from transformers import PreTrainedTokenizerFast as held\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from skiff_runtime.grammar.library import xgrammar
assert xgrammar.logging.__name__.startswith("transformers.") and xgrammar.part.held.__module__.startswith("transformers.")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_can_be_imported_after_it() -> None:
    code = "from skiff_runtime.grammar.library import xgrammar\nfrom transformers import PreTrainedTokenizerFast as t\nprint(t.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith("transformers.")
