"""What the rehearsal of a rank's steps launches; nothing is compiled here."""

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
from skiff_runtime.prebuild import ahead_of_time as rehearsal
from skiff_runtime.processes.resolve import resolve

seen = set()
def told(given):
    return (str(given.dtype), *given.shape, *given.stride()) if isinstance(given, torch.Tensor) else given
def launch(kernel, *given, grid, warmup, **options):
    constants = json.dumps(options, sort_keys=True, default=str)
    seen.add((kernel.fn.__name__, constants, str(grid), str([told(each) for each in given])))
triton.JITFunction.run = launch

path, quantization, tp, rank = *sys.argv[1:3], *map(int, sys.argv[3:])
group = rehearsal.DetachedRank
rehearsal.DetachedRank = lambda _rank, size, device: group(rank, size, device)
sizes = {"max_running_requests": 17, "max_model_len": 512}
config, model = resolve(
    Config(model=path, device="cpu", dtype="bfloat16", quantization=quantization, tp_size=tp, **sizes)
)
rehearsal.rehearse(config, model, 90)
print(json.dumps(sorted(seen)))
"""

Launch = tuple[str, dict[str, Any], str, str]


def launches(model: Path, tp: int, rank: int = 0, quantization: str = "none") -> list[Launch]:
    """Kernel, constants, grid and arguments of each distinct launch."""
    done = run_compiling("-c", LAUNCHES, str(model), quantization, str(tp), str(rank))
    assert done.returncode == 0, done.stderr
    return [(name, json.loads(constants), *rest) for name, constants, *rest in json.loads(done.stdout)]


def constants(found: list[Launch], kernel: str, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(given[name] for name in names) for launched, given, *_ in found if launched == kernel}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kernels_are_those_of_a_rank(tmp_path: Path, tp: int) -> None:
    """Of four query heads and two KV heads; of the latter, each of four ranks has a copy of one."""
    found = launches(make_model(tmp_path, head_dim=16), tp)
    kv = max(1, 2 // tp)
    for kernel in ("decode_rows", "shared_prefix_attention_kernel"):
        assert constants(found, kernel, "KV", "GROUP") == {(kv, 4 // tp // kv)}, kernel
    assert constants(found, "_prefill", "KV", "HEADS") == {(kv, 4 // tp)}
    hidden, attended, inner = 64, 64 // tp, 96 // tp
    assert constants(found, "_one_token", "INPUTS") == {(hidden,), (attended,), (inner,)}
    assert constants(found, "silu_and_mul_kernel", "WIDTH") == {(inner,)}


@pytest.mark.parametrize(("tp", "quantization"), [(2, "fp8"), (4, "none")])
def test_every_rank_launches_the_same(tmp_path: Path, tp: int, quantization: str) -> None:
    """Though the last one's share of an odd vocabulary is shorter."""
    model = make_model(tmp_path, "qwen3")
    first = launches(model, tp, 0, quantization)
    assert first and first == launches(model, tp, tp - 1, quantization)
