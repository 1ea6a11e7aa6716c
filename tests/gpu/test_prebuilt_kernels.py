"""A start with kernels that were prebuilt without a GPU: it compiles nothing more, and has no compiler to do so."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from bf16_engine import make_wide_model
from compiling import run_compiling

from skiff_runtime.engine.memory_profile_cache import FOLDER

pytestmark = pytest.mark.gpu

OPTIONS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "max_running_requests": 17,
}
"""Options of both prebuilding and serving; 17 rows are enough for steps with shared prefixes."""
SERVE: Final = """
import json, sys
from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams

asked = [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.3}, {"logit_bias": {40: 2.0}},
         {"min_p": 0.1, "logprobs": 3, "prompt_logprobs": 2}, {"regex": "[a-f]{9}"}, {"presence_penalty": 1.0}] * 2
with LLM(sys.argv[1], device="cuda", max_total_tokens=2048, **json.loads(sys.argv[2])) as llm:
    prompts = [list(range(5, 5 + length)) for length in (1, 70, 3, 33, 200, 17, 64, 5)] * 2
    done = llm.generate(prompts, [SamplingParams(max_tokens=24, seed=at, **each) for at, each in enumerate(asked)])
    assert len(done) == len(asked) and all(each.token_ids for each in done)
"""


def files(directory: Path) -> set[Path]:
    """Return all files but the kept memory profiles, which a start adds."""
    found = {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}
    return {path for path in found if path.parts[0] != FOLDER}


@pytest.mark.parametrize(
    ("family", "quantization", "cache"),
    [
        ("qwen3", "none", "auto"),
        ("qwen3", "fp8", "auto"),
        ("qwen3", "fp8", "fp8_e4m3"),
        ("qwen3_moe", "none", "auto"),
        ("qwen3_moe", "fp8", "auto"),
    ],
)
def test_start_with_prebuilt_kernels_compiles_nothing(
    tmp_path: Path, family: str, quantization: str, cache: str
) -> None:
    model, directory = str(make_wide_model(tmp_path / "model", family)), tmp_path / "kernels"
    fp8 = {"quantization": quantization, "kv_cache_dtype": cache}
    options = {**OPTIONS, **fp8, "kernel_cache_dir": str(directory)}
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    major, minor = torch.cuda.get_device_capability()
    command = ["-m", "skiff_runtime", "prebuild", "--model-config", model, "--arch", f"{major}.{minor}"]
    built = run_compiling(*command, *flags, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert built.returncode == 0, built.stderr
    before = files(directory)
    started = run_compiling("-c", SERVE, model, json.dumps(options), variables={"CC": "/nowhere/cc"})
    assert started.returncode == 0 and "kernel_compiled" not in started.stderr, started.stderr
    assert files(directory) == before
