"""Products of few tokens and roundings to e4m3 in Triton, against float64: odd shapes, strides, every element written."""

import pytest
import torch
from kernel_device import DEVICE, TOLERANCE, error

from skiff_runtime.kernels import e4m3
from skiff_runtime.kernels import fp8 as reference
from skiff_runtime.kernels.fused import fp8, gemv

SHORT = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were whole numbers."""
TYPES = (torch.float32, SHORT)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (37, 100), (64, 1300), (40, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_token(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = noise(1, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = noise(outputs, inputs, dtype=dtype, seed=1)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    product = gemv.gemv(x, weight, added)
    assert product.shape == (1, outputs) and product.dtype == dtype
    assert error(product, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("wide", [False, True], ids=["both short", "wide token"])
def test_one_token_in_eight_bits(wide: bool) -> None:
    x, x_scales = e4m3.round_rows(noise(1, 208, dtype=torch.float32))
    weight, scales = e4m3.round_rows(noise(48, 208, dtype=torch.float32, seed=1))
    wanted = (x.double() * x_scales.double()) @ (weight.double() * scales.double()).T
    given = x.to(SHORT) if wide else x
    product = gemv.gemv(given, weight, scales=(x_scales, scales), dtype=torch.float32)
    assert error(product, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "tile", [gemv.Tile(16, warps=1), gemv.Tile(128, pair=True, warps=2), gemv.Tile(2048, pair=True, warps=8)]
)
def test_any_tile_gives_the_same(tile: gemv.Tile) -> None:
    x, weight = noise(1, 300, dtype=torch.float32), noise(71, 300, dtype=torch.float32, seed=1)
    assert error(gemv.gemv(x, weight, tile=tile), x.double() @ weight.double().T) < 1e-5


def test_it_pays_for_one_token_alone() -> None:
    weight = torch.empty(64, 32)
    assert gemv.pays(torch.empty(1, 32), weight)
    assert not gemv.pays(torch.empty(2, 32), weight) and not gemv.pays(torch.empty(0, 32), weight)
    assert not gemv.pays(torch.empty(1, 32), torch.empty(100_000, 32))


def same_rounding(found: e4m3.Rounded, wanted: e4m3.Rounded) -> None:
    """Rounded alike; the sums of norms and the exponentials of activations may differ in their last bits."""
    torch.testing.assert_close(found.scales.cpu(), wanted.scales, rtol=1e-2, atol=0)
    given = found.values.float().cpu() * found.scales.cpu()
    wide = wanted.values.float() * wanted.scales
    # The interpreter loses the carry where rounding up reaches a power of two.
    carried = (wanted.values.float().abs().log2().frac() == 0) & (DEVICE.type == "cpu")
    assert ((given - wide).abs() <= wide.abs() / 7 + wanted.scales / 256)[~carried].all()
    near = ((given - wide).abs() <= wide.abs() / 100)[~carried]
    assert near.float().mean() > 0.95


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 16), (5, 300), (3, 1025)])
def test_rounding(rows: int, width: int, dtype: torch.dtype) -> None:
    values = noise(rows, 2 * width, dtype=dtype)[:, :width]
    values[0] = 0
    found = fp8.round_activations(values)
    assert found.dtype == dtype
    same_rounding(found, reference.round_activations(values.cpu()))
    assert torch.equal(found.scales.cpu(), e4m3.round_rows(values.cpu())[1])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (4, 700)])
def test_what_is_made_and_rounded_at_once(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    same_rounding(fp8.silu_mul_and_round(x), reference.silu_mul_and_round(x.cpu()))
    found, total = fp8.add_norm_and_round(x[:, :width], residual, weight, 1e-5)
    wanted, summed = reference.add_norm_and_round(x[:, :width].cpu(), residual.cpu(), weight.cpu(), 1e-5)
    same_rounding(found, wanted)
    assert torch.equal(total.cpu(), summed)
