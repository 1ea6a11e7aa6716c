"""The FP8 kernels against float64 and their reference: quantization, GEMV and stream-K GEMM."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise

from skiff_runtime.kernels import fp8 as reference
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP16_DOWNSCALE,
    FP8Weight,
    QuantizedActivations,
    empty_fp8_weight,
    quantize_rows,
)
from skiff_runtime.kernels.triton.fp8 import add_rms_norm_gemv, quantize, stream_k_gemm
from skiff_runtime.kernels.triton.fp8.add_rms_norm_gemv import add_rms_norm_fp8_gemv
from skiff_runtime.kernels.triton.fp8.fp8_gemv import (
    can_quantize,
    fp8_gemv,
    fp8_gemv_silu_and_mul,
    is_preloading_profitable,
    quantizing_fp8_gemv,
)
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_and_mul
from skiff_runtime.kernels.tuning import (
    FP8GemvTile,
    NormGemvTile,
    PreloadingGemvTile,
    StreamKTile,
    overridden,
    tuning_for,
)

TYPES = (torch.float32, HALF)
FP8_TILES = FP8GemvTile(512), FP8GemvTile(64), FP8GemvTile(2048, warps=2)
PRELOADING_TILES = PreloadingGemvTile(64, 1, 3), PreloadingGemvTile(1024, 2, 1)
GEMV_SIZES = [(1, 16), (6, 208), (5, 1312), (3, 4096)]

pytestmark = pytest.mark.usefixtures("poisoned")


def make_weight(outputs: int, inputs: int) -> FP8Weight:
    weight = empty_fp8_weight(outputs, inputs, DEVICE)
    values, scales = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    weight.values.copy_(values)
    weight.scales.copy_(scales)
    return weight


def exact_product(
    x: QuantizedActivations, weight: FP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    product = (x.values.double() * x.scales.double()) @ (weight.values.double() * weight.scales.double()).T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize(("size", "bias", "dtype"), combine(GEMV_SIZES, (False, True), TYPES))
def test_fp8_gemv_equals_the_product(size: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    outputs, inputs = size
    x = quantize.quantize_activations(noise(1, inputs, dtype=dtype) * 30)
    values = x.values.float() * FP16_DOWNSCALE
    assert x.values.dtype == torch.float16 and torch.equal(values.to(E4M3).float(), values)
    weight = make_weight(outputs, inputs)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    for tile in (*FP8_TILES, *PRELOADING_TILES):
        product = fp8_gemv(x, weight, added, tile=tile)
        assert product.shape == (1, outputs) and product.dtype == dtype
        # On a GPU some sums are made in float16.
        tolerance = TOLERANCE[dtype] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
        assert error(product, exact_product(x, weight, added)) < tolerance


def test_fp8_gemv_of_the_largest_numbers_does_not_overflow() -> None:
    x = quantize.quantize_activations(torch.full((1, 256), 1e4, device=DEVICE, dtype=torch.float32))
    weight = make_weight(16, 256)
    weight.values.copy_(torch.full((16, 256), FP8_MAX).to(E4M3))
    assert error(fp8_gemv(x, weight), 1e4 * 256 * FP8_MAX * weight.scales.T) < 1e-3


@pytest.mark.parametrize(("size", "bias", "dtype"), combine(GEMV_SIZES, (False, True), TYPES))
def test_fused_fp8_gemv_has_the_bits_of_fp8_gemv_and_silu_and_mul(
    size: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    outputs, inputs = size
    x = quantize.quantize_activations(noise(1, inputs, dtype=dtype) * (2 / inputs**0.5))
    weight = make_weight(2 * outputs, inputs)
    added = noise(2 * outputs, dtype=dtype, seed=2) if bias else None
    gate, up = exact_product(x, weight, added).chunk(2, -1)
    for tile in (None, *FP8_TILES, *PRELOADING_TILES):
        product = fp8_gemv_silu_and_mul(x, weight, added, tile=tile)
        assert product.shape == (1, outputs) and product.dtype == dtype
        tolerance = TOLERANCE[dtype] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
        assert error(product, F.silu(gate) * up) < 2 * tolerance
        assert torch.equal(product, silu_and_mul(fp8_gemv(x, weight, added, tile=tile)))


@pytest.mark.parametrize("outputs, inputs", [(1, 16), (6, 208), (5, 1312)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bound", [math.inf, 20.0])
def test_fp8_gemv_that_quantizes_equals_the_product(
    outputs: int, inputs: int, bias: bool, bound: float
) -> None:
    weight, x = make_weight(outputs, inputs), noise(1, inputs, dtype=HALF) * 30
    added = noise(outputs, dtype=HALF, seed=2) if bias else None
    quantized = quantize.quantize_activations(x, bound)
    expected = exact_product(quantized, weight, added)
    for columns, rows in ((128, 4), (1024, 2)):
        tile = PreloadingGemvTile(columns, 1, rows)
        product = quantizing_fp8_gemv(x, weight, added, bound, tile=tile)
        assert torch.equal(product, fp8_gemv(quantized, weight, added, tile=tile))
        assert product.shape == (1, outputs) and product.dtype == HALF
        # On a GPU some sums are made in float16.
        assert error(product, expected) < (
            TOLERANCE[HALF] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
        )


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
def test_fp8_gemv_quantizes_to_the_bits_of_a_launch_that_does(dtype: torch.dtype) -> None:
    """The weight is a diagonal, so that outputs are single products, whose sum has no order."""
    weight, x = make_weight(48, 48), noise(1, 48, dtype=dtype) * 30
    weight.values.copy_(torch.eye(48).to(E4M3))
    for bound in (math.inf, 20.0):
        expected = fp8_gemv(quantize.quantize_activations(x, bound), weight)
        assert torch.equal(quantizing_fp8_gemv(x, weight, bound=bound), expected)


@pytest.mark.parametrize("outputs, inputs", [(1, 16), (6, 208), (19, 1312)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bound", [math.inf, 0.5])
def test_fp8_gemv_behind_a_norm_does_what_two_launches_do(
    outputs: int, inputs: int, bias: bool, bound: float
) -> None:
    x, residual = (noise(1, inputs, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
    norm_weight, weight = noise(inputs, dtype=torch.bfloat16, seed=5), make_weight(outputs, inputs)
    added = noise(outputs, dtype=torch.bfloat16, seed=2) if bias else None
    quantized, total = quantize.add_rms_norm_quantize(x, residual, norm_weight, 1e-3, bound)
    expected = exact_product(quantized, weight, added)
    for tile in (NormGemvTile(2, 256), NormGemvTile(8, 1024)):
        product, own_total = add_rms_norm_fp8_gemv(
            x, residual, norm_weight, 1e-3, weight, added, bound, tile=tile
        )
        assert torch.equal(own_total, total)
        assert product.shape == (1, outputs) and product.dtype == torch.bfloat16
        # On a GPU some sums are made in float16, and a rounding of the norm may differ.
        tolerance = (1 if DEVICE.type == "cpu" else 2) * TOLERANCE[torch.bfloat16]
        assert error(product, expected) < tolerance


def test_norms_that_one_program_can_hold_are_part_of_the_gemv() -> None:
    token, several = torch.empty(1, 64, dtype=torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16)
    assert add_rms_norm_gemv.supports(token, token)
    assert not add_rms_norm_gemv.supports(several, several)
    assert not add_rms_norm_gemv.supports(token.half(), token.half())
    tuning = tuning_for(DEVICE).fp8_gemv
    widest = add_rms_norm_gemv.MAX_WARPS * tuning.norm_tile.inputs_per_warp
    with overridden(replace(tuning_for(DEVICE), fp8_gemv=replace(tuning, max_normed_weights=16 * widest))):
        assert add_rms_norm_gemv.is_fusion_profitable(make_weight(16, widest))
        assert not add_rms_norm_gemv.is_fusion_profitable(make_weight(17, widest))
        assert not add_rms_norm_gemv.is_fusion_profitable(make_weight(1, widest + 16))


def test_single_tokens_of_two_bytes_are_quantized_by_the_gemv() -> None:
    assert can_quantize(torch.empty(1, 16_384, dtype=HALF))
    assert not can_quantize(torch.empty(1, 16_512, dtype=HALF))
    assert not can_quantize(torch.empty(2, 64, dtype=HALF))
    assert not can_quantize(torch.empty(1, 64, dtype=torch.float32))


def test_small_weights_are_preloaded_up_to_the_size_of_the_table() -> None:
    """Rows that the registers of eight warps cannot keep are not, however small the weight is."""
    tuning, weight = tuning_for(DEVICE), make_weight(16, 64)
    for most in (0, 16 * 64 - 1, 16 * 64):
        with overridden(replace(tuning, fp8_gemv=replace(tuning.fp8_gemv, max_preloaded_weights=most))):
            assert is_preloading_profitable(weight) is (most == 16 * 64)
    assert is_preloading_profitable(weight)
    assert not is_preloading_profitable(empty_fp8_weight(1, 16_512, DEVICE))


TILES = [
    StreamKTile(128, stages=2, programs=1),
    StreamKTile(128, stages=3, programs=7),
    StreamKTile(256, stages=2, programs=9),
    StreamKTile(128, stages=2, programs=500),
]
"""One program takes everything; programs share tiles or take several; every program has one block."""


@pytest.mark.parametrize("tokens", [1, 3, 16, 33])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_stream_k_gemm_equals_the_product_and_leaves_counters_zero(tokens: int, tile: StreamKTile) -> None:
    weight = make_weight(192, 1280)
    x = QuantizedActivations(*quantize_rows(noise(tokens, 1280, dtype=torch.float32)), torch.float32)
    for added in (None, noise(192, dtype=torch.float32, seed=2)):
        product = stream_k_gemm.stream_k_gemm(x, weight, added, tile=tile)
        assert product.shape == (tokens, 192) and product.dtype == torch.float32
        assert error(product, exact_product(x, weight, added)) < (1e-5 if DEVICE.type == "cpu" else 1e-3)
        assert not weight.tile_counters.any()


def test_stream_k_gemm_is_deterministic() -> None:
    """Whichever program comes last adds the parts of a tile up in the order of the inputs."""
    weight = make_weight(128, 4096)
    x = QuantizedActivations(*quantize_rows(noise(5, 4096, dtype=torch.float32)), HALF)
    tile = StreamKTile(128, stages=2, programs=13)
    first = stream_k_gemm.stream_k_gemm(x, weight, tile=tile)
    for _ in range(3 if DEVICE.type == "cpu" else 200):
        assert torch.equal(stream_k_gemm.stream_k_gemm(x, weight, tile=tile), first)


@pytest.mark.parametrize(
    "tokens, outputs, inputs, expected",
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
def test_stream_k_is_profitable_by_shape_and_where_the_gpu_has_room(
    tokens: int, outputs: int, inputs: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = QuantizedActivations(torch.empty(tokens, inputs), torch.empty(tokens, 1), HALF)
    weight = make_weight(outputs, inputs)
    for capability, shared, fits in ((90, 227, True), (120, 50, False), (88, 227, False), (0, 227, False)):
        monkeypatch.setattr(stream_k_gemm, "compute_capability", lambda _, found=capability: found)
        monkeypatch.setattr(stream_k_gemm, "max_shared_memory_bytes", lambda _, found=shared: found << 10)
        assert stream_k_gemm.is_profitable(x, weight) is (expected and fits)


def assert_quantized_alike(found: QuantizedActivations, expected: QuantizedActivations) -> None:
    """Compare but for the last bits, in which the sums of norms and the exponentials of activations may differ."""
    downscale = FP16_DOWNSCALE if len(found.scales) == 1 else 1.0
    torch.testing.assert_close(found.scales.cpu(), expected.scales * downscale, rtol=1e-2, atol=0)
    values = found.values.float().cpu() * found.scales.cpu()
    wide = expected.values.float() * expected.scales
    assert ((values - wide).abs() <= wide.abs() / 7 + expected.scales / 256).all()
    near = (values - wide).abs() <= wide.abs() / 100
    assert near.float().mean() > 0.95


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 16), (5, 300), (3, 1025)])
def test_quantized_activations_equal_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    values = noise(rows, 2 * width, dtype=dtype)[:, :width]
    if rows > 1:
        values[0] = 0
    found = quantize.quantize_activations(values)
    assert found.dtype == dtype
    assert_quantized_alike(found, reference.quantize_activations(values.cpu()))
    scales = quantize_rows(values.cpu())[1] * (FP16_DOWNSCALE if rows == 1 else 1)
    assert torch.equal(found.scales.cpu(), scales)


SINGLE_ROW_CHUNK = tuning_for(DEVICE).single_row_chunk


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "rows, width", [(1, 64), (1, 3 * SINGLE_ROW_CHUNK + 70), (4, 700), (2, 512), (3, 1088)]
)
def test_fused_quantization_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    x[0, width - 1] = x[-1, 0] = 20  # the largest of a row, and so its scale, may be at either end
    for bound in (math.inf, 0.75):
        assert_quantized_alike(
            quantize.silu_and_mul_quantize(x, bound), reference.silu_and_mul_quantize(x.cpu(), bound)
        )
        found, total = quantize.add_rms_norm_quantize(x[:, :width], residual, weight, 1e-5, bound)
        expected, expected_total = reference.add_rms_norm_quantize(
            x[:, :width].cpu(), residual.cpu(), weight.cpu(), 1e-5, bound
        )
        assert_quantized_alike(found, expected)
        assert torch.equal(total.cpu(), expected_total)
    other = noise(rows, width, dtype=dtype, seed=3)
    found, total = quantize.add_rms_norm_quantize(x[:, :width], residual, weight, 1e-5, other=other)
    expected, expected_total = quantize.add_rms_norm_quantize(x[:, :width] + other, residual, weight, 1e-5)
    assert torch.equal(found.values.float(), expected.values.float())
    assert torch.equal(found.scales, expected.scales) and torch.equal(total, expected_total)


@pytest.mark.parametrize("rows", [1, 4])
def test_bound_clamps_larger_rows_and_leaves_the_others_their_scale(rows: int) -> None:
    values = noise(rows, 300, dtype=torch.float32)
    values[0] *= 10
    values[1:] /= 10
    found = quantize.quantize_activations(values, 2.0)
    assert_quantized_alike(found, reference.quantize_activations(values.cpu().clamp(-2, 2)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, SINGLE_ROW_CHUNK, 3 * SINGLE_ROW_CHUNK + 70])
def test_a_row_is_quantized_alike_by_one_program_and_by_many(width: int, dtype: torch.dtype) -> None:
    """Behind SwiGLU's product, fused or not, and whichever chunk has the largest magnitude."""
    gate_up = noise(1, 2 * width, dtype=dtype)
    tuning = tuning_for(DEVICE)
    for position in (0, width // 2, width - 1):
        gate_up[0, position] = gate_up[0, width + position] = 9 + position / width
        x = silu_and_mul(gate_up)
        for bound in (math.inf, 0.75):
            expected = quantize.silu_and_mul_quantize(gate_up, bound)
            for max_block in (width - 1, width):
                with overridden(replace(tuning, single_row_max_block=max_block)):
                    found = quantize.quantize_activations(x, bound)
                assert found.dtype == expected.dtype and found.values.dtype == torch.float16
                assert torch.equal(found.values, expected.values)
                assert torch.equal(found.scales, expected.scales)
