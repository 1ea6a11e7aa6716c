"""The GEMV kernels against float64 and each other: odd shapes, strided inputs, every element written."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, HALF, TOLERANCE, error, noise

from skiff_runtime.kernels.triton.linear.gemv import (
    MAX_PRELOADED_INPUTS,
    _choose_tile,
    gemv,
    gemv_silu_and_mul,
    is_fusion_profitable,
    is_profitable,
)
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_and_mul
from skiff_runtime.kernels.tuning import GemvTile, PreloadingGemvTile, overridden, tuning_for

TYPES = (torch.float32, HALF)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (37, 100), (64, 1300), (40, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv_equals_the_product(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = noise(1, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = noise(outputs, inputs, dtype=dtype, seed=1)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    product = gemv(x, weight, added)
    assert product.shape == (1, outputs) and product.dtype == dtype
    assert error(product, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "tile",
    [
        GemvTile(16, warps=1),
        GemvTile(128, pair=True, warps=2),
        GemvTile(2048, pair=True, warps=8),
        PreloadingGemvTile(16, 1, 2),
        PreloadingGemvTile(128, 1, 5),
        PreloadingGemvTile(1024, 4, 1),
    ],
)
def test_every_tile_gives_the_same_product(tile: GemvTile | PreloadingGemvTile) -> None:
    x, weight = noise(1, 300, dtype=torch.float32), noise(71, 300, dtype=torch.float32, seed=1)
    assert error(gemv(x, weight, tile=tile), x.double() @ weight.double().T) < 1e-5


def test_gemv_is_profitable_for_one_token_and_no_output_head() -> None:
    x, weight = torch.empty(1, 32), torch.empty(64, 32)
    assert is_profitable(x, weight)
    assert not is_profitable(torch.empty(2, 32), weight) and not is_profitable(torch.empty(0, 32), weight)
    assert not is_profitable(x, torch.empty(tuning_for(DEVICE).gemv.max_outputs + 1, 32))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (37, 100), (64, 1300), (20, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_gemv_has_the_bits_of_gemv_and_silu_and_mul(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    """Whether ``gemv`` computes a row alone or with its neighbor makes no difference either."""
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
            others: list[GemvTile | PreloadingGemvTile] = [replace(tile, pair=not tile.pair)]
            if tile.warps == 4:  # with fewer, the preloading kernel may need more
                others += [PreloadingGemvTile(tile.columns, 4, rows) for rows in (1, 4)]
            for other in others:
                assert torch.equal(product, silu_and_mul(gemv(x, weight, added, tile=other)))
                assert torch.equal(product, gemv_silu_and_mul(x, weight, added, tile=other))


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


def test_small_weights_are_preloaded_up_to_the_size_of_the_table() -> None:
    """Rows that the registers of eight warps cannot keep are not, however small the weight is."""
    tuning = tuning_for(DEVICE)
    x, weight = noise(1, 96, dtype=HALF), noise(33, 96, dtype=HALF, seed=1)
    outputs = []
    for most in (0, weight.numel() - 1, weight.numel()):
        with overridden(replace(tuning, gemv=replace(tuning.gemv, max_preloaded_weights=most))):
            is_preloaded = isinstance(_choose_tile(weight), PreloadingGemvTile)
            assert is_preloaded is (most == weight.numel())
            assert not isinstance(
                _choose_tile(noise(1, MAX_PRELOADED_INPUTS + 8, dtype=HALF)), PreloadingGemvTile
            )
            outputs.append(gemv(x, weight))
    assert torch.equal(outputs[0], outputs[1]) and error(outputs[2], outputs[0]) < TOLERANCE[HALF]
