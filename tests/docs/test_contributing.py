"""The example diffs of docs/contributing, a new model and a new attention backend, apply to the code and work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DIFFS = ("adding-a-model.diff", "adding-an-attention-backend.diff")
CHECK = """
from pathlib import Path
from tiny_models import greedy_tokens, load_reference, make_model
from skiff_runtime import LLM
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import count_parameters

path = make_model(Path("model"), "seed_oss")
prompts = [[1, 5, 9], [7] * 40]
with LLM(str(path), attention_backend="eager", max_total_tokens=512, page_size=4, cpu_threads=1, max_num_batched_tokens=16) as llm:
    generated = [each.token_ids for each in llm.generate(prompts, max_tokens=10, temperature=0, ignore_eos=True)]
reference = load_reference(path)
expected = [greedy_tokens(reference, prompt, 10) for prompt in prompts]
counted = count_parameters(read_model_config(path)).total
assert generated == expected, (generated, expected)
assert counted == reference.num_parameters(), (counted, reference.num_parameters())
print("same")
"""


def test_diffs_apply_and_serve_the_new_model_with_the_new_backend(tmp_path: Path) -> None:
    for part in ("runtime/skiff_runtime", "tests/support"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS:
        command = ["git", "apply", str(ROOT / "docs/contributing" / diff)]
        applied = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert applied.returncode == 0, f"{diff} no longer fits the code it changes:\n{applied.stderr}"
    search = os.pathsep.join(str(tmp_path / part) for part in ("runtime", "tests/support"))
    environment = {**os.environ, "PYTHONPATH": search, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    checked = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.strip() == "same"
