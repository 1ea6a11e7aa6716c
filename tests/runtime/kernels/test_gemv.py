"""The GEMV kernels against float64 and each other: odd shapes, strided inputs, every element written."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise

from skiff_runtime.kernels.triton.linear.gemv import (
    gemv,
    gemv_silu_and_mul,
    is_fusion_profitable,
    is_profitable,
)
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_and_mul
from skiff_runtime.kernels.tuning import GemvTile, overridden, tuning_for

TYPES = (torch.float32, HALF)
FEW = 4 if DEVICE.type == "cpu" else 64
"""Outputs of the larger weights: each is a program, which the interpreter runs one after the other."""
SIZES = [(1, 16), (FEW + 1, 100), (FEW, 1300), (FEW - 1, 4096)]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("size", "bias", "dtype"), combine(SIZES, (False, True), TYPES))
def test_gemv_equals_the_product(size: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    outputs, inputs = size
    x = noise(1, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = noise(outputs, inputs, dtype=dtype, seed=1)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    product = gemv(x, weight, added)
    assert product.shape == (1, outputs) and product.dtype == dtype
    assert error(product, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "tile", [GemvTile(16, warps=1), GemvTile(128, pair=True, warps=2), GemvTile(2048, pair=True, warps=8)]
)
def test_every_tile_gives_the_same_product(tile: GemvTile) -> None:
    x, weight = noise(1, 300, dtype=torch.float32), noise(71, 300, dtype=torch.float32, seed=1)
    assert error(gemv(x, weight, tile=tile), x.double() @ weight.double().T) < 1e-5


def test_gemv_is_profitable_for_one_token_and_no_output_head() -> None:
    x, weight = torch.empty(1, 32), torch.empty(64, 32)
    assert is_profitable(x, weight)
    assert not is_profitable(torch.empty(2, 32), weight) and not is_profitable(torch.empty(0, 32), weight)
    assert not is_profitable(x, torch.empty(tuning_for(DEVICE).gemv.max_outputs + 1, 32))


@pytest.mark.parametrize(("size", "bias", "dtype"), combine(SIZES, (False, True), TYPES))
def test_fused_gemv_has_the_bits_of_gemv_and_silu_and_mul(
    size: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    """``gemv`` gives the same bits whether a program computes one row or two neighbors."""
    outputs, inputs = size
    x = noise(1, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = noise(2 * outputs, inputs, dtype=dtype, seed=1) * (2 / inputs**0.5)
    added = noise(2 * outputs, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    gate, up = exact.chunk(2, -1)
    for tile in (None, GemvTile(16, warps=1), GemvTile(128, pair=True, warps=2), GemvTile(2048, warps=4)):
        product = gemv_silu_and_mul(x, weight, added, tile=tile)
        assert product.shape == (1, outputs) and product.dtype == dtype
        assert error(product, F.silu(gate) * up) < 2 * TOLERANCE[dtype]
        assert torch.equal(product, silu_and_mul(gemv(x, weight, added, tile=tile)))
        if tile is not None:
            other = replace(tile, pair=not tile.pair)
            assert torch.equal(product, silu_and_mul(gemv(x, weight, added, tile=other)))


def test_fused_gemv_takes_rows_that_are_apart() -> None:
    x, weight = noise(1, 48, dtype=HALF), noise(10, 100, dtype=HALF, seed=1)[:, 16:64]
    assert torch.equal(gemv_silu_and_mul(x, weight), gemv_silu_and_mul(x, weight.contiguous()))


def test_fused_gemv_is_profitable_where_gemv_is_unless_the_table_excludes_it() -> None:
    x, weight = torch.empty(1, 32), torch.empty(64, 32)
    tuning = tuning_for(DEVICE)
    assert is_fusion_profitable(x, weight) is tuning.gemv.fuse_silu_and_mul
    with overridden(replace(tuning, gemv=replace(tuning.gemv, fuse_silu_and_mul=False))):
        assert not is_fusion_profitable(x, weight)
    with overridden(replace(tuning, gemv=replace(tuning.gemv, fuse_silu_and_mul=True))):
        assert is_fusion_profitable(x, weight) and not is_fusion_profitable(torch.empty(2, 32), weight)
