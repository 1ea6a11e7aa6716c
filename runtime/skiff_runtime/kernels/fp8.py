"""FP8 weights and activations (e4m3: 4 bits of exponent, 3 of mantissa; Micikevicius et al., 2022), on any device.

A weight has one scale for each output, activations one for each token, and their product is multiplied by both. The tensor cores of a
GPU multiply FP8 numbers into bfloat16; on a CPU, and for models in float32, the quantized numbers are multiplied in float32.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.torch_internals import scaled_mm

E4M3: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest finite FP8 number."""
FP16_DOWNSCALE: Final = 256.0
"""The divisor of FP8 activations that are kept in float16: a power of two, so that no bit is lost, and large enough that float16 holds
the sum of 80 products with FP8 weights."""
MIN_SCALE: Final = 1e-12
"""The scale of rows that are zero, or nearly."""
ALIGNMENT: Final = 16
"""The inputs and outputs of a weight must be multiples of it for a GPU's FP8 product."""


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations [T, n]: FP8 ``values`` times ``scales`` float32 [T, 1]; products of them are of type ``dtype``.

    On a GPU the values of a single token are float16, though rounded to FP8 numbers, divided by ``FP16_DOWNSCALE``, and their scale is
    multiplied by it: the kernel that multiplies them would only have to convert them back.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """A layer's weight: FP8 ``values`` [outputs, inputs] times ``scales`` float32 [outputs, 1].

    ``tile_counters`` int32 [outputs], all zero, belong to the product in flight (``stream_k_gemm``), so a weight can have one at a time.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tile_counters: torch.Tensor


Activations = torch.Tensor | QuantizedActivations


def empty_fp8_weight(outputs: int, inputs: int, device: torch.device) -> FP8Weight:
    """Allocate a weight whose values and scales are yet to be filled."""
    return FP8Weight(
        values=torch.empty((outputs, inputs), dtype=E4M3, device=device),
        scales=torch.empty((outputs, 1), dtype=torch.float32, device=device),
        tile_counters=torch.zeros(outputs, dtype=torch.int32, device=device),
    )


def cast_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest FP8 numbers; larger magnitudes become the largest, where torch's own conversion makes NaN."""
    return values.float().clamp_(-FP8_MAX, FP8_MAX).to(E4M3)


def quantize_rows(values: torch.Tensor, bound: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [N, n] to (FP8 [N, n], scales float32 [N, 1]), such that the largest magnitude of each row becomes 448.

    Magnitudes beyond ``bound`` become the bound. In plain torch, which any thread may call.
    """
    wide = values.float()
    # As a tensor, because a division by a Python number is rounded differently.
    fp8_max = torch.full((1, 1), FP8_MAX, device=values.device)
    amax = wide.abs().amax(1, keepdim=True).clamp_(max=bound)
    scales = (amax / fp8_max).clamp_(min=MIN_SCALE)
    return cast_to_fp8(wide * scales.reciprocal()), scales


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
    """Return x [T, inputs], quantized here if it is not yet, times weight [outputs, inputs] plus bias [outputs]: [T, outputs]."""
    quantized = x if isinstance(x, QuantizedActivations) else quantize_activations(x)
    if weight.values.device.type == "cuda" and quantized.dtype != torch.float32:
        return _gpu_product(quantized, weight, bias)
    product = F.linear(quantized.values.float(), weight.values.float()) * quantized.scales * weight.scales.T
    return (product if bias is None else product + bias.float()).to(quantized.dtype)


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
