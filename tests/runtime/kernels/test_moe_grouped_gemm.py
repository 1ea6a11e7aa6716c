"""Grouped products of experts against float64: every tile and format, odd sizes, uneven routing."""

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise
from moe_reference import Format, exact_down, exact_gate_up, make_experts, route, take_window

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.fused_moe import ExpertWeights
from skiff_runtime.kernels.triton.fp8.quantize import quantize_activations
from skiff_runtime.kernels.triton.fp8.quantize_groups import quantize_groups
from skiff_runtime.kernels.triton.moe import grouped_gemm
from skiff_runtime.kernels.triton.moe.moe_align_block_size import moe_align_block_size
from skiff_runtime.kernels.triton.moe.moe_sum import moe_sum
from skiff_runtime.kernels.tuning import GroupedGemmTile

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = GroupedGemmTile(outputs=16, inputs=32, group=1, warps=4, stages=2)
TILES = [
    SMALL,
    GroupedGemmTile(outputs=64, inputs=64, group=3, warps=4, stages=3, swap=True),
    GroupedGemmTile(outputs=32, inputs=128, group=16, warps=8, stages=2),
]
FP8_TILES = [
    GroupedGemmTile(outputs=64, inputs=128, group=1, warps=4, stages=3, swap=True),
    GroupedGemmTile(outputs=32, inputs=128, group=4, warps=4, stages=2),
]
TOLERANCES = TOLERANCE | ({} if DEVICE.type == "cpu" else {torch.float32: 1e-4})


def quantize(x: torch.Tensor, experts: ExpertWeights) -> torch.Tensor | QuantizedActivations:
    if experts.gate_up_scales is None:
        return x
    return quantize_activations(x) if experts.block_shape is None else quantize_groups(x)


def check(
    experts: ExpertWeights,
    tokens: int,
    ids: torch.Tensor,
    tile: GroupedGemmTile,
    rows: int,
    dtype: torch.dtype,
) -> None:
    """Compare both products, each with an exact one of what it was given, and the sum of the pairs."""
    count, hidden, inner = experts.down.shape
    first, pairs = experts.first_expert, ids.numel()
    sorted_pairs = moe_align_block_size(ids, first_expert=first, experts=count, rows=rows)
    x = quantize(noise(tokens, hidden, dtype=dtype), experts)
    is_here = ((ids >= first) & (ids < first + count)).flatten().cpu()

    between = torch.empty((pairs, inner), dtype=dtype, device=DEVICE)
    values, scales = split(x, experts.gate_up_scales)
    grouped_gemm.gate_up(values, experts.gate_up, scales, sorted_pairs, between, tile=tile)
    assert error(between.cpu()[is_here], exact_gate_up(x, experts, ids)[is_here]) < TOLERANCES[dtype]
    assert between.cpu()[~is_here].isnan().all(), "rows of experts elsewhere are not written"

    y = quantize(noise(pairs, inner, dtype=dtype, seed=9), experts)
    topk_weights = noise(*ids.shape, dtype=torch.float32, seed=5).abs()
    weighted = torch.empty((pairs, hidden), dtype=dtype, device=DEVICE)
    values, scales = split(y, experts.down_scales)
    grouped_gemm.down(values, experts.down, scales, topk_weights, sorted_pairs, weighted, tile=tile)
    expected = exact_down(y, experts, ids) * topk_weights.double().cpu().view(-1, 1)
    assert error(weighted.cpu()[is_here], expected[is_here]) < TOLERANCES[dtype]

    output = torch.empty((tokens, hidden), dtype=dtype, device=DEVICE)
    moe_sum(weighted, ids, output, first_expert=first, experts=count)
    assert error(output, expected.view(tokens, -1, hidden).sum(1)) < 2 * TOLERANCES[dtype]


def split(
    x: torch.Tensor | QuantizedActivations, scales: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    if isinstance(x, torch.Tensor):
        return x, None
    assert scales is not None
    return x.values, (x.scales, scales)


@pytest.mark.parametrize(
    ("tile", "dtype", "size"), combine(TILES, [torch.float32, HALF], [(128, 64), (80, 48)])
)
def test_products_equal_the_reference(
    tile: GroupedGemmTile, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    hidden, inner = size
    _, ids = route(21, 8, 2)
    check(make_experts(8, hidden, inner, dtype), 21, ids, tile, 16, dtype)


@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
@pytest.mark.parametrize("weight_format", ["fp8", "block_fp8"])
def test_fp8_products_equal_the_reference(weight_format: Format, tile: GroupedGemmTile) -> None:
    _, ids = route(21, 8, 2)
    check(make_experts(8, 256, 128, HALF, weight_format), 21, ids, tile, 16, HALF)


@pytest.mark.parametrize("weight_format", ["model", "fp8"])
def test_sizes_need_not_be_multiples_of_a_tile(weight_format: Format) -> None:
    _, ids = route(9, 4, 3)
    check(make_experts(4, 144, 112, HALF, weight_format), 9, ids, FP8_TILES[0], 16, HALF)


@pytest.mark.parametrize("rows", [16, 64])
def test_all_tokens_may_choose_one_expert(rows: int) -> None:
    ids = torch.full((70, 1), 2, dtype=torch.int32, device=DEVICE)
    check(make_experts(4, 64, 32, HALF), 70, ids, SMALL, rows, HALF)


@pytest.mark.parametrize("first", [0, 3, 6])
def test_pairs_of_experts_elsewhere_are_neither_computed_nor_added(first: int) -> None:
    _, ids = route(19, 8, 3)
    check(take_window(make_experts(8, 64, 32, HALF), first, 2), 19, ids, SMALL, 16, HALF)
