"""The block FP8 kernels against float64 and their reference: quantization in groups, GEMV, stream-K and tiled GEMM."""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise

from skiff_runtime.kernels import fp8 as reference
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP16_DOWNSCALE,
    BlockFP8Weight,
    QuantizedActivations,
    quantize_groups,
    quantize_rows,
)
from skiff_runtime.kernels.torch_internals import supports_block_scaled_mm
from skiff_runtime.kernels.triton.fp8 import block_fp8_gemm
from skiff_runtime.kernels.triton.fp8 import quantize as quantize_kernels
from skiff_runtime.kernels.triton.fp8 import quantize_groups as kernels
from skiff_runtime.kernels.triton.fp8.block_fp8_gemv import block_fp8_gemv
from skiff_runtime.kernels.tuning import FP8GemvTile, MatrixTile, StreamKTile

TYPES = (torch.float32, HALF)

pytestmark = pytest.mark.usefixtures("poisoned")


def spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    return scales.double().repeat_interleave(FP8_BLOCK, 1)[:, :width]


def make_weight(outputs: int, inputs: int) -> tuple[BlockFP8Weight, torch.Tensor]:
    """Return a weight whose blocks have quite different scales, and what it stands for in float64."""
    values, _ = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    blocks, columns = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    scales = torch.zeros((blocks, -(-columns // 4) * 4), device=DEVICE)
    generator = torch.Generator().manual_seed(outputs)
    scales[:, :columns] = (torch.rand((blocks, columns), generator=generator) + 0.1).to(DEVICE) / 100
    exact = values.double() * spread(scales, inputs).repeat_interleave(FP8_BLOCK, 0)[:outputs]
    counters = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    return BlockFP8Weight(values, scales, counters), exact


def quantize_several(tokens: int, inputs: int, dtype: torch.dtype) -> QuantizedActivations:
    """Quantize random activations as the kernels do for several tokens, also where there is one."""
    values, scales = quantize_groups(noise(tokens, inputs, dtype=torch.float32))
    return QuantizedActivations(values, scales.T.contiguous().T, dtype)


def dequantize(x: QuantizedActivations) -> torch.Tensor:
    return x.values.double() * spread(x.scales, x.values.shape[1])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 16), (1, 1300), (5, 128), (3, 1312)])
def test_quantized_groups_equal_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    values = noise(rows, 2 * width, dtype=dtype)[:, :width]
    values[0, :100] = 0
    found = kernels.quantize_groups(values)
    expected, scales = quantize_groups(values.cpu())
    downscale = FP16_DOWNSCALE if rows == 1 else 1.0
    assert found.dtype == dtype and found.values.dtype == (torch.float16 if rows == 1 else E4M3)
    assert torch.equal(found.scales.cpu(), scales * downscale)
    assert torch.equal((found.values.float() * downscale).cpu(), expected.float())
    if rows > 1:
        assert found.scales.stride() == (1, rows)


def assert_close(found: QuantizedActivations, expected: QuantizedActivations) -> None:
    """Compare but for the last bits, in which the sums of norms and the exponentials of activations may differ."""
    values, wide = dequantize(found).cpu(), dequantize(expected)
    scales = spread(expected.scales, values.shape[1])
    assert ((values - wide).abs() <= wide.abs() / 7 + scales / 256).all()
    assert ((values - wide).abs() <= wide.abs() / 100).double().mean() > 0.95


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (1, 1312), (4, 700), (2, 512)])
def test_fused_quantization_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    x[0, width - 1] = x[-1, 0] = 20
    assert_close(kernels.silu_and_mul_quantize_groups(x), reference.silu_and_mul_quantize_groups(x.cpu()))
    found, total = kernels.add_rms_norm_quantize_groups(x[:, :width], residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm_quantize_groups(
        x[:, :width].cpu(), residual.cpu(), weight.cpu(), 1e-5
    )
    assert_close(found, expected)
    assert torch.equal(total.cpu(), expected_total)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [64, 2100])
def test_static_quantization_takes_the_largest_scale_and_saturates(rows: int, width: int) -> None:
    x = noise(rows, width, dtype=torch.float32) * 30
    scales = torch.tensor([0.05, 0.1, 0.02], device=DEVICE)
    found = quantize_kernels.quantize_static_activations(x, scales)
    expected = reference.quantize_static_activations(x.cpu(), scales.cpu())
    downscale = FP16_DOWNSCALE if rows == 1 else 1.0
    assert torch.equal(found.scales.cpu(), expected.scales * downscale)
    assert torch.equal((found.values.float() * downscale).cpu(), expected.values.float())
    assert (expected.scales == 0.1).all() and expected.values.float().abs().max() == FP8_MAX


GEMV_TILES = [FP8GemvTile(512), FP8GemvTile(64), FP8GemvTile(2048, warps=2)]


@pytest.mark.parametrize(
    ("size", "tile", "dtype", "bias"),
    combine([(1, 16), (48, 208), (37, 1312), (260, 512)], GEMV_TILES, TYPES, [False, True]),
)
def test_block_fp8_gemv_equals_the_product(
    size: tuple[int, int], tile: FP8GemvTile, dtype: torch.dtype, bias: bool
) -> None:
    outputs, inputs = size
    x = kernels.quantize_groups(noise(1, inputs, dtype=dtype) * 30)
    weight, exact = make_weight(outputs, inputs)
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    expected = dequantize(x) @ exact.T + (0 if added is None else added.double())
    found = block_fp8_gemv(x, weight, added, tile=tile)
    assert found.shape == (1, outputs) and found.dtype == dtype
    # On a GPU some sums are made in float16.
    tolerance = TOLERANCE[dtype] if DEVICE.type == "cpu" else TOLERANCE[torch.bfloat16]
    assert error(found, expected) < tolerance


TILES = [
    StreamKTile(128, stages=2, programs=1),
    StreamKTile(128, stages=3, programs=7),
    StreamKTile(256, stages=2, programs=9),
    StreamKTile(128, stages=2, programs=500),
]
"""One program takes everything; programs share tiles or take several; every program has one block."""


@pytest.mark.parametrize(("tokens", "tile", "bias"), combine([1, 3, 33], TILES, [False, True]))
def test_stream_k_gemm_equals_the_product_and_leaves_counters_zero(
    tokens: int, tile: StreamKTile, bias: bool
) -> None:
    weight, exact = make_weight(192, 1280)
    added = noise(192, dtype=torch.float32, seed=2) if bias else None
    x = quantize_several(tokens, 1280, torch.float32)
    expected = dequantize(x) @ exact.T + (0 if added is None else added.double())
    for _ in range(2):
        found = block_fp8_gemm.block_fp8_stream_k_gemm(x, weight, added, tile=tile)
        assert found.shape == (tokens, 192) and found.dtype == torch.float32
        assert error(found, expected) < (1e-5 if DEVICE.type == "cpu" else 1e-3)
        assert not weight.tile_counters.any()


@pytest.mark.parametrize(
    ("shape", "tile", "bias"),
    combine(
        [(1, 16, 16), (70, 208, 400), (300, 384, 256)],
        [MatrixTile(32, 64, 4, 2), MatrixTile(64, 128, 4, 3)],
        [False, True],
    ),
)
def test_tiled_gemm_equals_the_product_of_any_sizes(
    shape: tuple[int, int, int], tile: MatrixTile, bias: bool
) -> None:
    tokens, outputs, inputs = shape
    weight, exact = make_weight(outputs, inputs)
    added = noise(outputs, dtype=HALF, seed=2) if bias else None
    x = quantize_several(tokens, inputs, HALF)
    found = block_fp8_gemm.block_fp8_gemm(x, weight, added, tile=tile)
    expected = dequantize(x) @ exact.T + (0 if added is None else added.double())
    assert found.shape == (tokens, outputs) and error(found, expected) < TOLERANCE[HALF]


@pytest.mark.parametrize(
    "tokens, outputs, inputs, stream_k, library",
    [
        (2, 64, 128, True, False),
        (64, 128, 128, True, True),
        (65, 128, 128, False, False),
        (68, 128, 128, False, True),
        (68, 192, 128, False, False),
        (68, 128, 192, False, False),
        (4, 96, 256, False, False),
    ],
)
def test_product_is_chosen_by_shape_and_gpu(
    tokens: int, outputs: int, inputs: int, stream_k: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, (weight, _) = quantize_several(tokens, inputs, torch.bfloat16), make_weight(outputs, inputs)
    x_float16 = replace(x, dtype=torch.float16)
    monkeypatch.setattr(block_fp8_gemm, "HAS_BLOCK_SCALED_MM", True)
    for capability, shared, fits in ((90, 227, True), (100, 227, True), (120, 50, False), (88, 227, False)):
        monkeypatch.setattr(block_fp8_gemm, "compute_capability", lambda _, found=capability: found)
        monkeypatch.setattr(block_fp8_gemm, "max_shared_memory_bytes", lambda _, found=shared: found << 10)
        assert block_fp8_gemm.is_stream_k_profitable(x, weight) is (stream_k and fits)
        assert block_fp8_gemm.is_library_usable(x, weight) is (library and capability == 90)
        assert not block_fp8_gemm.is_library_usable(x_float16, weight), "the library would round to bfloat16"


@pytest.mark.parametrize(
    ("cuda_version", "supported"),
    [("12.9", True), ("13.0", True), ("12.8", False), ("12.6", False), ("12", False), (None, False)],
)
def test_library_needs_the_cuda_version_of_its_scaling_modes(
    cuda_version: str | None, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has the function in its builds for older versions, too, where it raises."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda: None, raising=False)
    assert supports_block_scaled_mm(cuda_version) is supported
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert not supports_block_scaled_mm(cuda_version)
