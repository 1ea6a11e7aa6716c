"""FP8 products and quantization of activations, on any device.

A weight has one scale for each output, activations one for each token, and their product is multiplied by both. The
tensor cores of a GPU multiply FP8 numbers into bfloat16; on a CPU, and for models in float32, the quantized numbers
are multiplied in float32.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.fp8_tensors import E4M3, FP8Weight, QuantizedActivations, quantize_rows
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.torch_internals import scaled_mm

ALIGNMENT: Final = 16
"""The inputs and outputs of a weight must be multiples of it for a GPU's FP8 product."""

Activations = torch.Tensor | QuantizedActivations


def quantize_activations(x: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Quantize x [T, n] with one scale for each token; magnitudes beyond ``bound`` become the bound."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.quantize_activations(x, bound)
    return QuantizedActivations(*quantize_rows(x, bound), x.dtype)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bound: float = math.inf
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return (the quantized ``rms_norm`` of the sum, the sum) of x and residual, both [T, n]."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.add_rms_norm_quantize(x, residual, weight, eps, bound)
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_activations(normed, bound), total


def silu_and_mul_quantize(gate_up: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Return ``silu_and_mul`` of gate_up [T, 2n], quantized."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.silu_and_mul_quantize(gate_up, bound)
    return quantize_activations(silu_and_mul(gate_up), bound)


def fp8_linear(x: Activations, weight: FP8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs].

    Activations that are not quantized yet are quantized here.
    """
    quantized = x if isinstance(x, QuantizedActivations) else quantize_activations(x)
    if weight.values.device.type == "cuda" and quantized.dtype != torch.float32:
        return _gpu_product(quantized, weight, bias)
    product = _multiply_in_float32(quantized, weight.values, weight.scales)
    return (product if bias is None else product + bias.float()).to(quantized.dtype)


def multiply_dequantized(x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return x [T, inputs] times FP8 values [outputs, inputs] with scales float32 [outputs], as a CPU computes it."""
    return _multiply_in_float32(x, values, scales).to(x.dtype)


def _multiply_in_float32(x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return F.linear(x.values.float(), values.float()) * x.scales * scales.view(1, -1)


def _gpu_product(x: QuantizedActivations, weight: FP8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the GEMV for one token, stream-K for few, and the library for many."""
    from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv
    from skiff_runtime.kernels.triton.fp8.stream_k_gemm import is_profitable, stream_k_gemm

    if x.values.dtype != E4M3:
        return fp8_gemv(x, weight, bias)
    if is_profitable(x, weight):
        return stream_k_gemm(x, weight, bias)
    product: torch.Tensor = scaled_mm(
        x.values,
        weight.values.T,
        scale_a=x.scales,
        scale_b=weight.scales.T,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    product = product.to(x.dtype)
    return product if bias is None else product + bias
