"""Mixtures of experts on a GPU: tokens equal those of transformers, and nothing waits for the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, known_logits, make_wide_model
from engine_driver import generate, make_engine
from fp8_checkpoints import PROMPTS, generate_greedy, quantize_linear_layers
from tiny_models import MOE_FAMILIES, load_reference, make_model, oracle_choices

from skiff_runtime.kernels.fused_moe import (
    ExpertWeights,
    compute_router_logits,
    fused_experts,
    fused_topk,
)
from skiff_runtime.messages import SamplingSpec

pytestmark = pytest.mark.gpu

COUNT = 24
SAMPLINGS = [
    SamplingSpec(max_tokens=COUNT, seed=number, temperature=number % 3 * 0.5, top_k=number % 2 * 20)
    for number in range(12)
]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(2, 300, int(random.integers(1, 90))).tolist() for _ in range(count)]


def generate_warm(path: Path, samplings: list[SamplingSpec] | None = None, **changes: Any) -> list[list[int]]:
    """Generate tokens of twelve requests in mixed batches, by an engine that has warmed up."""
    settings = {**SETTINGS, "max_running_requests": 8, "max_num_batched_tokens": 64, **changes}
    engine = make_engine(path, **settings)
    engine.warmup()
    outputs = generate(engine, prompts(12), COUNT, page_size=16, budget=64, slots=8, samplings=samplings)
    engine.close()
    return outputs


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def test_bfloat16_tokens_differ_from_transformers_no_more_than_its_own_by_rounding(model: Path) -> None:
    """A rounding error may choose another expert, which changes a logit by more than a rounding error of its own.

    So only the number of tokens that differ is bounded: by twice that between transformers in bfloat16 and in float32.
    """
    crowd = prompts(12)
    outputs = generate_warm(model)
    rounded, exact = (
        torch.cat(known_logits(model, dtype, crowd, outputs)) for dtype in (torch.bfloat16, torch.float32)
    )
    chosen = torch.tensor(outputs).flatten()
    different, unsure = (int((rounded.argmax(-1) != each).sum()) for each in (chosen, exact.argmax(-1)))
    assert different <= 2 * max(unsure, len(crowd) * COUNT // 100)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_float32_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family, seed=3)
    outputs = generate_greedy(path, device="cuda")
    assert outputs == oracle_choices(load_reference(path), PROMPTS, outputs)


def test_tokens_do_not_depend_on_graphs(model: Path) -> None:
    assert generate_warm(model, SAMPLINGS, disable_cuda_graph=True) == generate_warm(model, SAMPLINGS)


def test_fp8_tokens_differ_from_transformers_no_more_than_its_own_by_rounding(model: Path) -> None:
    """Both round the same values to FP8. Transformers in bfloat16 and in float32 give other tokens for a quarter, or more."""
    crowd = prompts(12)
    outputs = generate_warm(model, quantization="fp8")
    choices = []
    for dtype in (torch.bfloat16, torch.float32):
        oracle = load_reference(model, dtype)
        quantize_linear_layers(oracle)
        choices.append(np.concatenate(oracle_choices(oracle, crowd, outputs)))
    rounded, exact = choices
    different, unsure = (int((exact != each).sum()) for each in (np.concatenate(outputs), rounded))
    assert different <= 1.25 * unsure


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize("fp8", [False, True])
def test_nothing_waits_for_the_device(tokens: int, fp8: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, router = draw(tokens, 256), draw(32, 256)
    gate_up, down = draw(32, 256, 256) / 16, draw(32, 256, 128) / 16
    experts = ExpertWeights(gate_up, down)
    if fp8:
        ones = torch.ones(32, 256, device="cuda")
        experts = ExpertWeights(gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn), ones, ones)

    def compute() -> torch.Tensor:
        weights, ids = fused_topk(compute_router_logits(x, router), 4, renormalize=True)
        return fused_experts(x, experts, weights, ids)

    first = compute()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
