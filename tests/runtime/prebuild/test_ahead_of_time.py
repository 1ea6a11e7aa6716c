"""The kernels that ahead-of-time compilation launches for a rank; nothing is compiled here."""

import json
from pathlib import Path
from typing import Any

import pytest
from compiling import run_compiling
from tiny_models import make_model

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

LAUNCHES = """
import json, sys
import torch, triton
from skiff_runtime.config import Config
from skiff_runtime.prebuild import ahead_of_time
from skiff_runtime.processes.resolve import resolve

seen = set()
def describe(given):
    return (str(given.dtype), *given.shape, *given.stride()) if isinstance(given, torch.Tensor) else given
def launch(kernel, *given, grid, warmup, **options):
    constants = json.dumps(options, sort_keys=True, default=str)
    seen.add((kernel.fn.__name__, constants, str(grid), str([describe(each) for each in given])))
triton.JITFunction.run = launch

path, quantization, tp, rank = *sys.argv[1:3], *map(int, sys.argv[3:])
group = ahead_of_time.DetachedRank
ahead_of_time.DetachedRank = lambda _rank, tp_size, device: group(rank, tp_size, device)
sizes = {"max_running_requests": 17, "max_model_len": 512}
config, model = resolve(
    Config(model=path, device="cpu", dtype="bfloat16", quantization=quantization, tp_size=tp, **sizes)
)
ahead_of_time.compile_ahead_of_time(config, model, 90)
print(json.dumps(sorted(seen)))
"""

Launch = tuple[str, dict[str, Any], str, str]


def launches(model: Path, tp: int, rank: int = 0, quantization: str = "none") -> list[Launch]:
    """Return (kernel, constants, grid, arguments) of each distinct launch."""
    done = run_compiling("-c", LAUNCHES, str(model), quantization, str(tp), str(rank))
    assert done.returncode == 0, done.stderr
    return [(name, json.loads(constants), *rest) for name, constants, *rest in json.loads(done.stdout)]


def constants(found: list[Launch], kernel: str, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(given[name] for name in names) for launched, given, *_ in found if launched == kernel}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kernels_have_the_sizes_of_one_rank(tmp_path: Path, tp: int) -> None:
    """The model has four query heads and two KV heads, so each of four ranks holds a copy of one KV head."""
    found = launches(make_model(tmp_path, head_dim=16), tp)
    kv = max(1, 2 // tp)
    for kernel in ("decode_attention_kernel", "shared_prefix_attention_kernel"):
        assert constants(found, kernel, "KV", "GROUP") == {(kv, 4 // tp // kv)}, kernel
    assert constants(found, "prefill_attention_kernel", "KV", "HEADS") == {(kv, 4 // tp)}
    hidden, attended, inner = 64, 64 // tp, 96 // tp
    assert constants(found, "gemv_kernel", "INPUTS") == {(hidden,), (attended,), (inner,)}
    assert constants(found, "silu_and_mul_kernel", "WIDTH") == {(inner,)}


@pytest.mark.parametrize(("tp", "quantization"), [(2, "fp8"), (4, "none")])
def test_all_ranks_launch_the_same_kernels(tmp_path: Path, tp: int, quantization: str) -> None:
    """The vocabulary's size is odd, so the last rank's share is shorter."""
    model = make_model(tmp_path, "qwen3")
    first = launches(model, tp, 0, quantization)
    assert first and first == launches(model, tp, tp - 1, quantization)
