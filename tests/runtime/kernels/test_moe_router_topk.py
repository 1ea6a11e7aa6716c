"""The router of few tokens in one launch: the bits of the launches that it replaces, and counters that are left zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_device import DEVICE, HALF, combine, noise

from skiff_runtime.kernels.fused_moe import ROUTER_COUNTERS
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.moe.fused_topk import fused_topk
from skiff_runtime.kernels.triton.moe.router_topk import (
    add_rms_norm_router_topk,
    is_norm_profitable,
    is_profitable,
    router_topk,
)
from skiff_runtime.kernels.triton.norm_act.rms_norm import add_rms_norm, row_warps
from skiff_runtime.kernels.tuning import GemvTile, overridden, tuning_for

EPS = 1e-5

pytestmark = pytest.mark.usefixtures("poisoned")


@contextmanager
def tuned(**numbers: Any) -> Iterator[None]:
    table = tuning_for(DEVICE)
    with overridden(replace(table, moe=replace(table.moe, **numbers))):
        yield


def zero_counters() -> torch.Tensor:
    return torch.zeros(ROUTER_COUNTERS, dtype=torch.int32, device=DEVICE)


def assert_same(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], experts: int
) -> None:
    """Compare weights and ids, bit for bit where the experts are a power of two and one warp holds them."""
    rtol = 0 if experts in (8, 128) else 1e-6
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=0)
    assert torch.equal(found[1], expected[1])


def select(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by a GEMV for each token, and a launch that selects experts."""
    width = x.shape[1]
    tile = GemvTile(1 << (width - 1).bit_length(), warps=row_warps(width))
    logits = [gemv(row[None], weight, tile=tile, dtype=torch.float32) for row in x]
    return fused_topk(torch.cat(logits), top_k, renormalize=renormalize)


@pytest.mark.parametrize(
    ("size", "tokens", "rows", "renormalize"),
    combine(
        [(8, 3, 48), (60, 4, 100), (128, 8, 256), (128, 1, 2048), (5, 5, 16)], [1, 4], [1, 3], [False, True]
    ),
)
def test_routing_has_the_bits_of_a_product_and_a_selection(
    size: tuple[int, int, int], tokens: int, rows: int, renormalize: bool
) -> None:
    experts, top_k, width = size
    weight, counters = noise(experts, width, dtype=HALF) * (3 / width**0.5), zero_counters()
    for seed in (1, 2):
        x = noise(tokens, 2 * width, dtype=HALF, seed=seed)[:, :width]
        with tuned(router_topk_rows=rows):
            weights, ids = router_topk(x, weight, counters, top_k, renormalize=renormalize)
        assert_same((weights, ids), select(x, weight, top_k, renormalize=renormalize), experts)
        assert not counters.any()
        exact = (x.double() @ weight.double().T).cpu().softmax(-1).topk(top_k)
        assert torch.equal(ids.long().cpu(), exact.indices)


@pytest.mark.parametrize(
    ("size", "tokens", "rows"), combine([(8, 3, 48), (60, 4, 100), (128, 8, 2048)], [1, 4], [1, 3])
)
def test_norm_and_routing_have_the_bits_of_a_norm_of_its_own(
    size: tuple[int, int, int], tokens: int, rows: int
) -> None:
    experts, top_k, width = size
    weight, counters = noise(experts, width, dtype=HALF) * (3 / width**0.5), zero_counters()
    norm_weight = noise(width, dtype=HALF, seed=1)
    for seed in (2, 3):
        x = noise(tokens, 2 * width, dtype=HALF, seed=seed)[:, :width]
        residual = noise(tokens, 3 * width, dtype=HALF, seed=seed + 10)[:, :width] * 4
        with tuned(router_topk_rows=rows):
            normed, total, weights, ids = add_rms_norm_router_topk(
                x, residual, norm_weight, EPS, weight, counters, top_k, renormalize=True
            )
        expected_normed, expected_total = add_rms_norm(x, residual, norm_weight, EPS)
        assert torch.equal(normed, expected_normed) and torch.equal(total, expected_total)
        assert_same((weights, ids), select(normed, weight, top_k, renormalize=True), experts)
        assert not counters.any()


def test_nan_gives_experts_that_exist_and_stays_in_its_row() -> None:
    weight, x, counters = noise(12, 32, dtype=HALF), noise(3, 32, dtype=HALF, seed=1), zero_counters()
    x[1, 5] = torch.nan
    weights, ids = router_topk(x, weight, counters, 5, renormalize=True)
    assert weights[1].isnan().all() and not weights[::2].isnan().any() and not counters.any()
    for row in ids.tolist():
        assert len(set(row)) == 5 and all(0 <= expert < 12 for expert in row)


def test_few_tokens_of_two_bytes_are_routed_by_one_launch() -> None:
    counters = zero_counters()
    with tuned(max_router_topk_tokens=4, fuse_router_norm=True):
        for tokens in (1, 4):
            x = torch.empty(tokens, 32, dtype=HALF, device=DEVICE)
            assert is_profitable(x, counters) and is_norm_profitable(x, counters)
            assert not is_profitable(x.float(), counters)
            with tuned(max_router_topk_tokens=4, fuse_router_norm=False):
                assert is_profitable(x, counters) and not is_norm_profitable(x, counters)
        for tokens in (0, 5):
            assert not is_profitable(torch.empty(tokens, 32, dtype=HALF, device=DEVICE), counters)
    with tuned(max_router_topk_tokens=0):
        assert not is_profitable(torch.empty(1, 32, dtype=HALF, device=DEVICE), counters)


def test_impossible_top_k() -> None:
    with pytest.raises(ValueError, match="top_k"):
        router_topk(noise(1, 32, dtype=HALF), noise(8, 32, dtype=HALF), zero_counters(), 9, renormalize=True)
