"""Layers whose matrices and activations are in e4m3, on any device.

A matrix is kept with one scale for each output, activations are rounded with one scale for each token, and their
product is scaled back by both. What a token has beyond a ``bound`` is rounded to the bound. A CPU has no such product,
and that of a GPU is in bfloat16: on the one, and for models in float32 on the other, the rounded numbers are multiplied
in float32.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.e4m3 import E4M3, Matrix, QuantizedActivations, quantize_rows
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.torch_internals import scaled_mm

ALIGNMENT: Final = 16
"""A GPU multiplies matrices whose inputs and outputs are multiples of it."""

Activations = torch.Tensor | QuantizedActivations


def quantize_activations(x: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """x [T, n], rounded."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as fp8

        return fp8.quantize_activations(x, bound)
    return QuantizedActivations(*quantize_rows(x, bound), x.dtype)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bound: float = math.inf
) -> tuple[QuantizedActivations, torch.Tensor]:
    """(``rms_norm`` of the sum, rounded; the sum) of x and residual, both [T, n]."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as fp8

        return fp8.add_rms_norm_quantize(x, residual, weight, eps, bound)
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_activations(normed, bound), total


def silu_and_mul_quantize(gate_up: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """[T, 2n] -> [T, n]: silu of the first half times the second, rounded."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as fp8

        return fp8.silu_and_mul_quantize(gate_up, bound)
    return quantize_activations(silu_and_mul(gate_up), bound)


def fp8_linear(x: Activations, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, inputs] times weight [outputs, inputs], plus bias [outputs]; [T, outputs]."""
    rounded = x if isinstance(x, QuantizedActivations) else quantize_activations(x)
    if weight.values.device.type == "cuda" and rounded.dtype != torch.float32:
        return _on_tensor_cores(rounded, weight, bias)
    product = F.linear(rounded.values.float(), weight.values.float()) * rounded.scales * weight.scales.T
    return (product if bias is None else product + bias.float()).to(rounded.dtype)


def _on_tensor_cores(x: QuantizedActivations, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    from skiff_runtime.kernels.triton.fp8.fp8_gemv import short_gemv
    from skiff_runtime.kernels.triton.fp8.stream_k_gemm import pays, streamed

    if x.values.dtype != E4M3:
        return short_gemv(x, weight, bias)
    if pays(x, weight):
        return streamed(x, weight, bias)
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
