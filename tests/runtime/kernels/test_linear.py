"""Products of few tokens and roundings to e4m3 in Triton, against float64: odd shapes, strides, every element written."""

import math

import pytest
import torch
from kernel_device import DEVICE, TOLERANCE, error

from skiff_runtime.kernels import e4m3
from skiff_runtime.kernels import fp8 as reference
from skiff_runtime.kernels.triton.fp8 import fp8_gemv as short_gemv
from skiff_runtime.kernels.triton.fp8 import fp8_row
from skiff_runtime.kernels.triton.fp8 import quantize as fp8
from skiff_runtime.kernels.triton.fp8 import stream_k_gemm as streamed
from skiff_runtime.kernels.triton.linear import gemv

SHORT = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were whole numbers."""
TYPES = (torch.float32, SHORT)


pytestmark = pytest.mark.usefixtures("poisoned")


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def matrix(outputs: int, inputs: int) -> e4m3.Matrix:
    made = e4m3.empty_fp8_weight(outputs, inputs, DEVICE)
    values, scales = e4m3.quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    made.values.copy_(values)
    made.scales.copy_(scales)
    return made


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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (48, 208), (37, 1312), (16, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_token_in_eight_bits(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = fp8.quantize_activations(noise(1, inputs, dtype=dtype) * 30)
    assert x.values.dtype == torch.float16 and torch.equal(
        (x.values.float() * e4m3.FP16_DOWNSCALE).to(e4m3.E4M3).float(), x.values.float() * e4m3.FP16_DOWNSCALE
    )
    weight = matrix(outputs, inputs)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    exact = (x.values.double() * x.scales.double()) @ (weight.values.double() * weight.scales.double()).T
    wanted = exact if added is None else exact + added.double()
    for tile in (short_gemv.Tile(512), short_gemv.Tile(64), short_gemv.Tile(2048, warps=2)):
        product = short_gemv.short_gemv(x, weight, added, tile=tile)
        assert product.shape == (1, outputs) and product.dtype == dtype
        assert error(product, wanted) < (
            TOLERANCE[dtype] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
        )


def test_the_largest_numbers_do_not_overflow() -> None:
    """All weights and activations the largest there are."""
    x = fp8.quantize_activations(torch.full((1, 256), 1e4, device=DEVICE, dtype=torch.float32))
    weight = matrix(16, 256)
    weight.values.copy_(torch.full((16, 256), e4m3.FP8_MAX).to(e4m3.E4M3))
    product = short_gemv.short_gemv(x, weight)
    assert error(product, 1e4 * 256 * e4m3.FP8_MAX * weight.scales.T) < 1e-3


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


TILES = [
    streamed.Tile(128, stages=2, programs=1),
    streamed.Tile(128, stages=3, programs=7),
    streamed.Tile(256, stages=2, programs=9),
    streamed.Tile(128, stages=2, programs=500),
]
"""Programs that take everything, that cut tiles or several, and that have but one block each."""


@pytest.mark.parametrize("tokens", [1, 3, 16, 33])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_in_eight_bits(tokens: int, tile: streamed.Tile, bias: bool) -> None:
    weight, inputs = matrix(192, 1280), 1280
    added = noise(192, dtype=torch.float32, seed=2) if bias else None
    wide = noise(tokens, inputs, dtype=torch.float32)
    x = e4m3.QuantizedActivations(*e4m3.quantize_rows(wide), torch.float32)
    exact = (x.values.double() * x.scales.double()) @ (weight.values.double() * weight.scales.double()).T
    wanted = exact if added is None else exact + added.double()
    for _ in range(2):  # and all is as before
        product = streamed.streamed(x, weight, added, tile=tile)
        assert product.shape == (tokens, 192) and product.dtype == torch.float32
        assert error(product, wanted) < (1e-5 if DEVICE.type == "cpu" else 1e-3)
        assert not weight.arrivals.any()


def test_a_streamed_product_is_always_the_same() -> None:
    """Whichever program comes last, sums are added up in the order of the inputs."""
    weight, x = (
        matrix(128, 4096),
        e4m3.QuantizedActivations(*e4m3.quantize_rows(noise(5, 4096, dtype=torch.float32)), SHORT),
    )
    first = streamed.streamed(x, weight, tile=streamed.Tile(128, stages=2, programs=13))
    for _ in range(3 if DEVICE.type == "cpu" else 200):
        assert torch.equal(
            streamed.streamed(x, weight, tile=streamed.Tile(128, stages=2, programs=13)), first
        )


@pytest.mark.parametrize(
    "tokens, outputs, inputs, wanted",
    [
        (2, 64, 128, True),
        (64, 128, 128, True),
        (65, 128, 128, False),
        (128, 64, 256, True),
        (129, 64, 256, False),
        (2, 96, 256, False),
        (2, 64, 192, False),
    ],
)
def test_for_what_streaming_pays(
    tokens: int, outputs: int, inputs: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = e4m3.QuantizedActivations(torch.empty(tokens, inputs), torch.empty(tokens, 1), SHORT)
    weight = matrix(outputs, inputs)
    for architecture, shared, fits in ((90, 227, True), (120, 50, False), (88, 227, False), (0, 227, False)):
        monkeypatch.setattr(streamed, "architecture", lambda _, found=architecture: found)
        monkeypatch.setattr(streamed, "max_shared_memory_bytes", lambda _, found=shared: found << 10)
        assert streamed.pays(x, weight) is (wanted and fits)


def same_rounding(found: e4m3.QuantizedActivations, wanted: e4m3.QuantizedActivations) -> None:
    """Rounded alike; the sums of norms and the exponentials of activations may differ in their last bits."""
    shrink = e4m3.FP16_DOWNSCALE if len(found.scales) == 1 else 1.0
    torch.testing.assert_close(found.scales.cpu(), wanted.scales * shrink, rtol=1e-2, atol=0)
    given = found.values.float().cpu() * found.scales.cpu()
    wide = wanted.values.float() * wanted.scales
    assert ((given - wide).abs() <= wide.abs() / 7 + wanted.scales / 256).all()
    near = (given - wide).abs() <= wide.abs() / 100
    assert near.float().mean() > 0.95


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 16), (5, 300), (3, 1025)])
def test_rounding(rows: int, width: int, dtype: torch.dtype) -> None:
    values = noise(rows, 2 * width, dtype=dtype)[:, :width]
    if rows > 1:
        values[0] = 0
    found = fp8.quantize_activations(values)
    assert found.dtype == dtype
    same_rounding(found, reference.quantize_activations(values.cpu()))
    assert torch.equal(
        found.scales.cpu(), e4m3.quantize_rows(values.cpu())[1] * (e4m3.FP16_DOWNSCALE if rows == 1 else 1)
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (1, 3 * fp8_row.PART + 70), (4, 700), (2, 512), (3, 1088)])
def test_what_is_made_and_rounded_at_once(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    x[0, width - 1] = x[-1, 0] = 20  # the largest of a row, and so its scale, may be at either end
    for bound in (math.inf, 0.75):
        same_rounding(fp8.silu_and_mul_quantize(x, bound), reference.silu_and_mul_quantize(x.cpu(), bound))
        found, total = fp8.add_rms_norm_quantize(x[:, :width], residual, weight, 1e-5, bound)
        wanted, summed = reference.add_rms_norm_quantize(
            x[:, :width].cpu(), residual.cpu(), weight.cpu(), 1e-5, bound
        )
        same_rounding(found, wanted)
        assert torch.equal(total.cpu(), summed)


@pytest.mark.parametrize("rows", [1, 4])
def test_rounding_within_a_bound(rows: int) -> None:
    """Rows beyond it have its scale, and the others their own."""
    values = noise(rows, 300, dtype=torch.float32)
    values[0] *= 10
    values[1:] /= 10
    found = fp8.quantize_activations(values, 2.0)
    same_rounding(found, reference.quantize_activations(values.cpu().clamp(-2, 2)))
