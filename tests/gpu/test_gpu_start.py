"""A start with kernels that were compiled ahead, as if there were no GPU: nothing more is compiled, nor could it be."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from half_engine import make_wide_model

pytestmark = pytest.mark.gpu

FLAGS: Final = ("--dtype", "bfloat16", "--attention", "triton", "--max-running-requests", "17")
"""So many that steps may share prefixes."""
SERVE: Final = """
import sys
from skiff_runtime.llm import LLM
from skiff_runtime.sampling import Sampling

asked = [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.3}, {"logit_bias": {40: 2.0}},
         {"min_p": 0.1, "logprobs": 3, "prompt_logprobs": 2}, {"regex": "[a-f]{9}"}, {"presence_penalty": 1.0}] * 2
model, directory, quantization, cache = sys.argv[1:]
options = {"quantization": quantization, "kv_cache_dtype": cache}
with LLM(model, dtype="bfloat16", device="cuda", attention="triton", max_running_requests=17, kernel_cache_dir=directory,
         kv_cache_tokens=2048, **options) as llm:
    prompts = [list(range(5, 5 + length)) for length in (1, 70, 3, 33, 200, 17, 64, 5)] * 2
    done = llm.generate(prompts, [Sampling(max_tokens=24, seed=at, **each) for at, each in enumerate(asked)])
    assert len(done) == len(asked) and all(each.token_ids for each in done)
"""


def files(directory: Path) -> set[Path]:
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("quantization", "cache"), [("none", "auto"), ("fp8", "auto"), ("fp8", "fp8_e4m3")])
def test_a_start_compiles_nothing(tmp_path: Path, quantization: str, cache: str) -> None:
    model, directory = make_wide_model(tmp_path / "model", "qwen3"), tmp_path / "kernels"
    major, minor = torch.cuda.get_device_capability()
    command = [sys.executable, "-m", "skiff_runtime", "prebuild", "--model-config", str(model), *FLAGS]
    command += ["--quantization", quantization, "--kv-cache-dtype", cache, "--arch", f"{major}.{minor}"]
    built = subprocess.run(
        [*command, "--kernel-cache-dir", str(directory)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert built.returncode == 0, built.stderr
    before = files(directory)
    started = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), str(directory), quantization, cache],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"CC": "/nowhere/cc"},
    )
    assert started.returncode == 0 and "kernel_compiled" not in started.stderr, started.stderr
    assert files(directory) == before
