"""Launches of the kernels of mixture of experts on an offline driver: what is compiled, and what is launched again."""

import json
import subprocess

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
ROUTER = """
    from dataclasses import replace
    from skiff_runtime.kernels.fused_moe import ROUTER_COUNTERS, add_rms_norm_route
    from skiff_runtime.kernels.tuning import DEFAULT, overridden

    weight, norm_weight = empty(EXPERTS, HIDDEN), empty(HIDDEN)
    counters = empty(ROUTER_COUNTERS, dtype=torch.int32)
    def normalize_and_route(tokens, most=4, fuse_norm=True):
        moe = replace(DEFAULT.moe, max_router_topk_tokens=most, fuse_router_norm=fuse_norm)
        count = len(launches)
        x = empty(tokens, HIDDEN)
        with overridden(replace(DEFAULT, moe=moe)):
            add_rms_norm_route(x, x, norm_weight, 1e-5, weight, counters, TOP_K, renormalize=True)
        return len(launches) - count

    assert [normalize_and_route(tokens) for tokens in (1, 2, 4)] == [1, 1, 1]
    assert normalize_and_route(1, fuse_norm=False) == 2
    assert normalize_and_route(1, most=0) == 3
    assert normalize_and_route(5) > 1
"""
LAYER = """
    import math
    from skiff_runtime.kernels.fp8 import add_rms_norm_quantize, fp8_linear
    from skiff_runtime.kernels.fp8_tensors import empty_fp8_weight
    from skiff_runtime.kernels.fused_moe import ROUTER_COUNTERS, add_rms_norm_route

    weights = [empty_fp8_weight(*shape, torch.device("cuda")) for shape in ((256, HIDDEN), (HIDDEN, 256))]
    experts, norm_weight, x = make("fp8", 0), empty(HIDDEN), empty(1, HIDDEN)
    counters = empty(ROUTER_COUNTERS, dtype=torch.int32)
    count = len(launches)
    normed, total = add_rms_norm_quantize(x, x, norm_weight, 1e-5)
    fp8_linear(normed, weights[0])
    output = fp8_linear(empty(1, 256), weights[1])
    normed, total, *routing = add_rms_norm_route(
        output, total, norm_weight, 1e-5, empty(EXPERTS, HIDDEN), counters, TOP_K, renormalize=True
    )
    fused_experts(normed, experts, *routing)
    assert len(launches) - count == 6, len(launches) - count
    names = [source.name for source, _ in driver.launched]
    assert names == [
        "add_rms_norm_quantize_kernel",
        "preloading_fp8_gemv_kernel",
        "preloading_fp8_gemv_kernel",
        "router_topk_kernel",
        "fp8_gate_up_gemv_kernel",
        "fp8_down_gemv_kernel",
    ], names
"""


STEPS = {"sizes": SIZES, "repeated": REPEATED, "single token": SINGLE_TOKEN, "router": ROUTER, "layer": LAYER}
FORK = """
import json
import os
import sys

for name, steps in json.loads(sys.argv[1]).items():
    process = os.fork()
    if not process:
        exec(steps)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), sep="=", flush=True)
"""
"""Runs each of the steps in a process of its own, with the same imports."""


@pytest.fixture(scope="module")
def done() -> "subprocess.CompletedProcess[str]":
    """The run of all steps, one after the other."""
    head, block = COMPILE.split("with use_offline_driver", 1)
    steps = {name: f"with use_offline_driver{block}{each}" for name, each in STEPS.items()}
    return run_compiling("-c", head + FORK, json.dumps(steps))


@pytest.mark.parametrize("name", STEPS)
def test_launches(done: "subprocess.CompletedProcess[str]", name: str) -> None:
    """Steps of other sizes with the same tiles, and other ranks, compile nothing; a second launch repeats the first.

    The products of a single token with FP8 experts need no launch that quantizes, and the norm and the selection of
    experts none besides the router's. So a layer has six launches beside those of attention.
    """
    assert done.returncode == 0 and f"{name}=0" in done.stdout.splitlines(), done.stderr
