"""FP8 matrix products on a GPU, on its tensor cores and by our kernels, against float64."""

from dataclasses import replace

import pytest
import torch
from kernel_device import TOLERANCE, error
from weight_shards import fill_shard

from skiff_runtime.kernels.fp8 import fp8_linear, fp8_linear_into, quantize_activations
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8Weight,
    QuantizedActivations,
    quantize_rows,
)
from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv, quantizing_fp8_gemv
from skiff_runtime.kernels.tuning import FP8GemvTile, PreloadingGemvTile, overridden, tuning_for
from skiff_runtime.layers.linear import ColumnParallelLinear, ModuleShard
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.sharding import LayerContext

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


@pytest.mark.parametrize(
    "outputs, inputs, bias", [(5120, 2048, False), (6144, 1024, False), (1152, 896, True)]
)
def test_small_projection_and_the_norm_before_it_are_one_launch(
    outputs: int, inputs: int, bias: bool
) -> None:
    """With what two launches compute, but for roundings of the norm; larger projections, and several tokens, take two."""
    context = LayerContext(torch.bfloat16, torch.device("cuda", 0), quantization="fp8")
    norm = QuantizingRMSNorm(inputs, 1e-6, context)
    norm.weight.copy_(noise(inputs, dtype=torch.bfloat16, seed=5))
    layer = ColumnParallelLinear(
        inputs, [ModuleShard("q_proj", outputs, 0, outputs)], bias=bias, context=context
    )
    for seed, shard in enumerate(layer.weight_shards("")):
        fill_shard(shard, noise(*shard.target.shape, dtype=torch.float32, seed=seed))
    tuning = tuning_for(torch.device("cuda", 0))
    for tokens in (1, 2):
        x, residual = (noise(tokens, inputs, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
        products = []
        for most in (0, outputs * inputs):
            table = replace(tuning, fp8_gemv=replace(tuning.fp8_gemv, max_normed_weights=most))
            with overridden(table), torch.inference_mode():
                fused = layer.weight.fused_add_rms_norm(x, residual, norm.weight, norm.eps, layer.bias)
                product, total = layer.apply_after_norm(norm, x, residual)
            assert isinstance(product, torch.Tensor) and torch.equal(total, x + residual)
            if tokens == 1 and most > 0:
                assert fused is not None and torch.equal(fused[0], product)
            else:
                assert fused is None
            products.append(product)
        assert error(products[0], products[1]) < TOLERANCE[torch.bfloat16]


def dequantize(x: QuantizedActivations) -> torch.Tensor:
    return x.values.double() * x.scales.double()
