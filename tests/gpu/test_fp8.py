"""FP8 matrix products on a GPU, on its tensor cores and by our kernels, against float64."""

import pytest
import torch
from kernel_device import TOLERANCE, error

from skiff_runtime.kernels.fp8 import fp8_linear, fp8_linear_into, quantize_activations
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8Weight,
    QuantizedActivations,
    quantize_rows,
)
from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv, quantizing_fp8_gemv
from skiff_runtime.kernels.tuning import FP8GemvTile, PreloadingGemvTile

pytestmark = pytest.mark.gpu


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33, 257])
@pytest.mark.parametrize("outputs, inputs", [(16, 16), (48, 208), (1024, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_linear_equals_reference(
    tokens: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    """For float16, too, the tensor cores return bfloat16, so its tolerance applies."""
    x = quantize_activations(noise(tokens, inputs, dtype=dtype, seed=tokens) * 3)
    assert x.values.dtype == (torch.float16 if tokens == 1 else E4M3)
    weight, scales = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    expected = dequantize(x) @ (weight.double() * scales.double()).T
    expected = expected if added is None else expected + added.double()
    tile_counters = torch.zeros(outputs, dtype=torch.int32, device="cuda")
    product = fp8_linear(x, FP8Weight(weight, scales, tile_counters), added)
    assert product.dtype == dtype and product.shape == (tokens, outputs)
    assert error(product, expected) < TOLERANCE[torch.bfloat16 if dtype == torch.float16 else dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [5, 512])
def test_fp8_product_of_some_rows_is_written_where_they_belong(tokens: int, dtype: torch.dtype) -> None:
    x = quantize_activations(noise(tokens + 6, 4096, dtype=dtype, seed=1))
    values, scales = quantize_rows(noise(1024, 4096, dtype=torch.float32, seed=2))
    weight = FP8Weight(values, scales, torch.zeros(1024, dtype=torch.int32, device="cuda"))
    out = torch.zeros(tokens + 6, 1024, dtype=dtype, device="cuda")
    rows = slice(4, 4 + tokens)
    fp8_linear_into(x.select_rows(rows), weight, out[rows])
    assert torch.equal(out[rows], fp8_linear(x.select_rows(rows), weight))
    assert not out[:4].any() and not out[4 + tokens :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outputs, inputs", [(48, 208), (2048, 4096), (1040, 5120), (1024, 16_384)])
def test_fp8_linear_quantizes_a_token(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """A small weight's GEMV quantizes the token itself; a diagonal shows its values, bit by bit."""
    x = noise(1, inputs, dtype=dtype, seed=3) * 3
    values, scales = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    weight = FP8Weight(values, scales, torch.zeros(outputs, dtype=torch.int32, device="cuda"))
    expected = dequantize(quantize_activations(x, 5.0)) @ (values.double() * scales.double()).T
    product = fp8_linear(x, weight, bound=5.0)
    assert product.dtype == dtype and error(product, expected) < TOLERANCE[torch.bfloat16]
    values.copy_(torch.eye(outputs, inputs, device="cuda").to(E4M3))
    assert torch.equal(fp8_linear(x, weight, bound=5.0), fp8_linear(quantize_activations(x, 5.0), weight))


@pytest.mark.parametrize("outputs, inputs", [(48, 208), (5120, 2048), (2048, 4096), (1024, 16_384)])
def test_a_quantized_token_gives_the_bits_of_one_that_the_gemv_quantizes(outputs: int, inputs: int) -> None:
    """However many rows a program has; the kernel for larger weights adds up in another order."""
    x = noise(1, inputs, dtype=torch.bfloat16, seed=3) * 3
    values, scales = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    weight = FP8Weight(values, scales, torch.zeros(outputs, dtype=torch.int32, device="cuda"))
    quantized = quantize_activations(x)
    expected = dequantize(quantized) @ (values.double() * scales.double()).T
    first = fp8_gemv(quantized, weight, tile=PreloadingGemvTile(1024, 1, 1))
    for rows in (1, 2, 4):
        tile = PreloadingGemvTile(1024, 1, rows)
        assert torch.equal(fp8_gemv(quantized, weight, tile=tile), first)
        assert torch.equal(quantizing_fp8_gemv(x, weight, tile=tile), first)
    assert error(first, expected) < TOLERANCE[torch.bfloat16]
    assert error(fp8_gemv(quantized, weight, tile=FP8GemvTile(1024)), first) < TOLERANCE[torch.bfloat16]


def dequantize(x: QuantizedActivations) -> torch.Tensor:
    return x.values.double() * x.scales.double()
