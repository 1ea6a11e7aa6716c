"""Products of few tokens with their experts against float64: every format, odd sizes, windows of experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise
from moe_reference import Format, exact_down, exact_gate_up, make_experts, route, take_window

from skiff_runtime.kernels.fp8_tensors import E4M3, QuantizedActivations, quantize_rows
from skiff_runtime.kernels.fused_moe import ExpertWeights
from skiff_runtime.kernels.triton.fp8.quantize import quantize_activations
from skiff_runtime.kernels.triton.fp8.quantize_groups import quantize_groups
from skiff_runtime.kernels.triton.moe.expert_gemv import (
    choose_columns,
    choose_down_tile,
    down_gemv,
    gate_up_gemv,
    is_profitable,
)
from skiff_runtime.kernels.triton.moe.fp8_expert_gemv import (
    can_quantize_pairs,
    can_quantize_token,
    fp8_down_gemv,
    fp8_gate_up_gemv,
)
from skiff_runtime.kernels.tuning import ExpertGemvTile, overridden, tuning_for

pytestmark = pytest.mark.usefixtures("poisoned")

TILES = [ExpertGemvTile(32, warps=1), ExpertGemvTile(1024, warps=4)]


def is_here(ids: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    local = ids.flatten().cpu() - experts.first_expert
    return (local >= 0) & (local < len(experts.down))


@contextmanager
def no_preloading() -> Iterator[None]:
    """Let down-projections load their weights only after gate and up were computed."""
    table = tuning_for(DEVICE)
    gemv, fp8_gemv = (replace(each, preload_down=False) for each in (table.moe.gemv, table.moe.fp8_gemv))
    with overridden(replace(table, moe=replace(table.moe, gemv=gemv, fp8_gemv=fp8_gemv))):
        yield


def check(
    experts: ExpertWeights,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tile: ExpertGemvTile,
    dtype: torch.dtype,
) -> None:
    """Compare both products, each with an exact one of what it was given."""
    (tokens, _), (_, hidden, inner) = ids.shape, experts.down.shape
    first, here = experts.first_expert, is_here(ids, experts)
    x, y = noise(tokens, hidden, dtype=dtype), noise(ids.numel(), inner, dtype=dtype, seed=9)
    between = gate_up_gemv(x, experts.gate_up, ids, first_expert=first, tile=tile)
    assert error(between.cpu()[here], exact_gate_up(x, experts, ids)[here]) < TOLERANCE[dtype]
    assert between.cpu()[~here].isnan().all()
    y[~here.to(DEVICE)] = torch.nan
    output = down_gemv(y, experts.down, topk_weights, ids, first_expert=first, tile=tile)
    expected = exact_down(y, experts, ids) * topk_weights.double().cpu().view(-1, 1)
    assert error(output, expected.view(tokens, -1, hidden).sum(1)) < TOLERANCE[dtype]
    with no_preloading():
        assert torch.equal(
            down_gemv(y, experts.down, topk_weights, ids, first_expert=first, tile=tile), output
        )


@pytest.mark.parametrize(
    ("size", "pairs", "dtype", "tile"),
    combine([(64, 16), (37, 9), (260, 12)], [(1, 1), (1, 4), (3, 2)], [torch.float32, HALF], TILES),
)
def test_products_equal_the_reference(
    size: tuple[int, int], pairs: tuple[int, int], dtype: torch.dtype, tile: ExpertGemvTile
) -> None:
    (hidden, inner), (tokens, top_k) = size, pairs
    topk_weights, ids = route(tokens, 8, top_k)
    check(make_experts(8, hidden, inner, dtype), ids, topk_weights, tile, dtype)


@pytest.mark.parametrize("first", [0, 3, 5])
def test_pairs_of_experts_elsewhere_count_nothing(first: int) -> None:
    topk_weights, ids = route(4, 8, 3)
    check(take_window(make_experts(8, 64, 32, HALF), first, 3), ids, topk_weights, TILES[0], HALF)


FP8_CASES: list[tuple[Format, int, int, int, int, int]] = [
    ("fp8", 72, 24, 1, 1, 0),
    ("fp8", 72, 24, 1, 4, 0),
    ("fp8", 136, 16, 3, 2, 0),
    ("fp8", 72, 24, 3, 3, 2),
    ("block_fp8", 256, 128, 1, 1, 0),
    ("block_fp8", 128, 256, 2, 2, 4),
]
"""Format, sizes, tokens, top_k, and the first expert that is here."""


FP8_TILES = [ExpertGemvTile(64, warps=1, rows=3), ExpertGemvTile(1024, warps=2, rows=4)]
"""The rows of the first divide few numbers of outputs, and not those of a block of 128."""
SMALL_FP8_CASES: list[tuple[tuple[Format, int, int, int, int, int], ExpertGemvTile]] = [
    (("fp8", 72, 8, 1, 1, 0), FP8_TILES[1]),
    (("fp8", 16, 72, 1, 4, 0), FP8_TILES[0]),
    (("fp8", 72, 8, 2, 2, 0), FP8_TILES[0]),
    (("fp8", 40, 24, 2, 3, 5), FP8_TILES[1]),
    (("block_fp8", 256, 128, 1, 1, 0), FP8_TILES[0]),
    (("block_fp8", 128, 256, 2, 2, 5), FP8_TILES[1]),
]
"""For the interpreter: each product with activations in float16 and in FP8, sums of several iterations and of part of
one, several pairs of a token, and experts that are elsewhere; of each format with both tiles."""


@pytest.mark.parametrize(
    ("case", "tile"), combine(FP8_CASES, FP8_TILES) if DEVICE.type == "cuda" else SMALL_FP8_CASES
)
def test_fp8_products_equal_the_reference(
    case: tuple[Format, int, int, int, int, int], tile: ExpertGemvTile
) -> None:
    weight_format, hidden, inner, tokens, top_k, first = case
    quantize = quantize_activations if weight_format == "fp8" else quantize_groups
    topk_weights, ids = route(tokens, 8, top_k)
    experts = take_window(make_experts(8, hidden, inner, HALF, weight_format), first, 8 - first)
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    here = is_here(ids, experts)
    x = quantize(noise(tokens, hidden, dtype=HALF))
    y = quantize(noise(len(here), inner, dtype=HALF, seed=9))
    assert x.values.dtype == (torch.float16 if tokens == 1 else E4M3)
    # On a GPU some sums are made in float16.
    tolerance = TOLERANCE[HALF] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
    between = fp8_gate_up_gemv(x, experts.gate_up, experts.gate_up_scales, ids, first_expert=first, tile=tile)
    assert error(between.cpu()[here], exact_gate_up(x, experts, ids)[here]) < tolerance
    assert between.cpu()[~here].isnan().all()
    output = fp8_down_gemv(
        y, experts.down, experts.down_scales, topk_weights, ids, first_expert=first, tile=tile
    )
    expected = exact_down(y, experts, ids) * topk_weights.double().cpu().view(-1, 1)
    assert error(output, expected.view(tokens, -1, hidden).sum(1)) < tolerance


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        each
        for each in (combine(FP8_CASES, FP8_TILES) if DEVICE.type == "cuda" else SMALL_FP8_CASES)
        if each[0][0] == "fp8"
    ],
)
def test_fp8_products_that_quantize_have_the_bits_of_a_launch_that_does(
    case: tuple[Format, int, int, int, int, int], tile: ExpertGemvTile
) -> None:
    """Values of experts that are elsewhere are NaN, which no program reads."""
    weight_format, hidden, inner, tokens, top_k, first = case
    topk_weights, ids = route(tokens, 8, top_k)
    experts = take_window(make_experts(8, hidden, inner, HALF, weight_format), first, 8 - first)
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    here = is_here(ids, experts).to(DEVICE)
    x = noise(tokens, hidden, dtype=HALF) * 30
    y = noise(len(here), inner, dtype=HALF, seed=9)
    assert can_quantize_token(x, experts.gate_up_scales)
    assert can_quantize_pairs(y, top_k, experts.down_scales)
    found, expected = (
        fp8_gate_up_gemv(each, experts.gate_up, experts.gate_up_scales, ids, first_expert=first, tile=tile)
        for each in (x, quantize_activations(x))
    )
    assert found.dtype == HALF and torch.equal(found[here], expected[here])
    assert found[~here].isnan().all()
    arguments = experts.down, experts.down_scales, topk_weights, ids
    expected = fp8_down_gemv(quantize_activations(y), *arguments, first_expert=first, tile=tile)
    y[~here] = torch.nan
    assert torch.equal(fp8_down_gemv(y, *arguments, first_expert=first, tile=tile), expected)
    with no_preloading():
        assert torch.equal(fp8_down_gemv(y, *arguments, first_expert=first, tile=tile), expected)


def test_products_quantize_rows_of_zeros() -> None:
    topk_weights, ids = route(1, 8, 2)
    experts = make_experts(8, 32, 16, HALF, "fp8")
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    x, y = torch.zeros(1, 32, dtype=HALF, device=DEVICE), torch.zeros(2, 16, dtype=HALF, device=DEVICE)
    between = fp8_gate_up_gemv(x, experts.gate_up, experts.gate_up_scales, ids, first_expert=0)
    output = fp8_down_gemv(y, experts.down, experts.down_scales, topk_weights, ids, first_expert=0)
    assert not between.any() and not output.any()


def test_a_launch_quantizes_what_a_product_cannot() -> None:
    """Rows that registers cannot hold, float32, and block FP8."""
    scales, block_scales = torch.empty(8, 64), torch.empty(8, 2, 2)
    assert can_quantize_token(torch.empty(1, 16_384, dtype=HALF), scales)
    assert not can_quantize_token(torch.empty(1, 16_512, dtype=HALF), scales)
    assert not can_quantize_token(torch.empty(1, 64, dtype=torch.float32), scales)
    assert not can_quantize_token(torch.empty(1, 256, dtype=HALF), block_scales)
    assert can_quantize_pairs(torch.empty(8, 2048, dtype=HALF), 8, scales)
    assert not can_quantize_pairs(torch.empty(9, 2048, dtype=HALF), 9, scales)
    assert not can_quantize_pairs(torch.empty(8, 256, dtype=HALF), 8, block_scales)


def test_rows_of_experts_elsewhere_may_be_nan_in_fp8() -> None:
    topk_weights, ids = route(2, 8, 4)
    experts = take_window(make_experts(8, 32, 16, HALF, "fp8"), 4, 4)
    here = is_here(ids, experts).to(DEVICE)
    assert experts.down_scales is not None and 0 < int(here.sum()) < len(here)
    values, scales = quantize_rows(noise(8, 16, dtype=torch.float32))
    clean = QuantizedActivations(values, scales, HALF)
    broken = QuantizedActivations(
        torch.where(here[:, None], values.float(), torch.nan).to(E4M3),
        torch.where(here[:, None], scales, torch.nan),
        HALF,
    )
    arguments = experts.down, experts.down_scales, topk_weights, ids
    outputs = [fp8_down_gemv(each, *arguments, first_expert=4) for each in (clean, broken)]
    assert torch.equal(*outputs)


def test_largest_fp8_numbers_do_not_overflow() -> None:
    topk_weights, ids = route(2, 8, 1)
    x = quantize_activations(torch.full((2, 256), 1e4, device=DEVICE))
    down = torch.full((8, 16, 256), 448.0, device=DEVICE).to(E4M3)
    scales = torch.full((8, 16), 1e-3, device=DEVICE)
    output = fp8_down_gemv(x, down, scales, topk_weights, ids, first_expert=0)
    assert error(output, 1e4 * 256 * 0.448 * topk_weights.expand(2, 16)) < 1e-3


def test_few_tokens_are_computed_without_sorting() -> None:
    assert is_profitable(1, 8, 8, DEVICE) and is_profitable(4, 8, 128, DEVICE)
    assert not is_profitable(5, 8, 128, DEVICE) and not is_profitable(2, 2, 8, DEVICE)


@pytest.mark.parametrize(
    "inputs, columns, expected",
    [
        (768, 512, 256),
        (1536, 512, 512),
        (384, 512, 512),
        (14336, 2048, 2048),
        (2880, 1024, 1024),
        (96, 64, 64),
    ],
)
def test_columns_leave_few_lanes_idle(inputs: int, columns: int, expected: int) -> None:
    assert choose_columns(inputs, ExpertGemvTile(columns, warps=1)) == expected


def test_long_experts_take_a_tile_of_their_own() -> None:
    tuning = tuning_for(DEVICE).moe.gemv
    assert choose_down_tile(tuning.short_inputs, tuning) is tuning.down
    assert choose_down_tile(tuning.short_inputs + 1, tuning) is tuning.long_down
