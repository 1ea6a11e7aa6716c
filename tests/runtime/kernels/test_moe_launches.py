"""Launches of the kernels of mixture of experts on an offline driver: what is compiled, and what is launched again."""

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

COMPILE = """
import torch
from skiff_runtime.kernels.fused_moe import ExpertWeights
from skiff_runtime.kernels.torch_internals import FakeTensorMode
from skiff_runtime.kernels.triton.moe.fused_experts import fused_experts
from skiff_runtime.kernels.triton.moe.fused_topk import fused_topk
from skiff_runtime.prebuild.offline_driver import OfflineDriver, use_offline_driver

EXPERTS, TOP_K, HIDDEN, INNER = 16, 2, 128, 128

launches = []
compiled_by = OfflineDriver.launcher_cls
def describe(argument):
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.data_ptr()
    return argument
def launcher(self, *given):
    compiled_by(self, *given)
    return lambda *arguments: launches.append([*arguments[:4], *map(describe, arguments[9:])])
OfflineDriver.launcher_cls = launcher

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def make(kind, first):
    if kind == "model":
        return ExpertWeights(empty(8, 2 * INNER, HIDDEN), empty(8, HIDDEN, INNER), first_expert=first)
    values = [empty(*shape, dtype=torch.float8_e4m3fn) for shape in ((8, 2 * INNER, HIDDEN), (8, HIDDEN, INNER))]
    if kind == "fp8":
        scales = [empty(*each.shape[:2], dtype=torch.float32) for each in values]
        return ExpertWeights(*values, *scales, first_expert=first)
    scales = [empty(8, each.shape[1] // 128, each.shape[2] // 128, dtype=torch.float32) for each in values]
    return ExpertWeights(*values, *scales, first_expert=first, block_shape=(128, 128))

def run(tokens, experts):
    weights, ids = fused_topk(empty(tokens, EXPERTS, dtype=torch.float32), TOP_K, renormalize=True)
    return fused_experts(empty(tokens, HIDDEN), experts, weights, ids)

with use_offline_driver(90) as driver, FakeTensorMode(), torch.inference_mode():
"""
SIZES = """
    for kind in ("model", "fp8", "block_fp8"):
        for sizes in ((1,), (5, 6, 7, 8), (9, 13, 16)):
            run(sizes[0], make(kind, 0))
            count = len(driver.launched)
            for tokens in sizes:
                for first in (0, 1, 8):
                    assert run(tokens, make(kind, first)).shape == (tokens, HIDDEN)
            names = [source.name for source, _ in driver.launched[count:]]
            assert not names, (kind, sizes, names)
    assert {"gate_up_kernel", "down_kernel", "fp8_gate_up_gemv_kernel"} < {each.name for each, _ in driver.launched}
"""
REPEATED = """
    experts = make("model", 0)
    for tokens in (1, 7):
        run(tokens, experts)
        first = launches[:]
        launches.clear()
        run(tokens, experts)
        assert first and first == launches, (tokens, first, launches)
        launches.clear()
"""
SINGLE_TOKEN = """
    run(1, make("fp8", 0))
    assert len(launches) == 3
    names = {source.name for source, _ in driver.launched}
    assert names == {"fused_topk_kernel", "fp8_gate_up_gemv_kernel", "fp8_down_gemv_kernel"}, names
"""


@pytest.mark.parametrize("steps", [SIZES, REPEATED, SINGLE_TOKEN], ids=["sizes", "repeated", "single token"])
def test_launches(steps: str) -> None:
    """Steps of other sizes with the same tiles, and other ranks, compile nothing; a second launch repeats the first.

    The products of a single token with FP8 experts need no launch that quantizes.
    """
    done = run_compiling("-c", COMPILE + steps)
    assert done.returncode == 0, done.stderr
