"""FP8 products and quantization of activations, on any device.

A weight has one scale for each output, activations one for each token, and their product is multiplied by both. The
tensor cores of a GPU multiply FP8 numbers into bfloat16; on a CPU, and for models in float32, the quantized numbers
are multiplied in float32.

In block FP8 a weight has a scale for each block of 128 x 128, and activations have one for each 128 elements of a token
(DeepSeek-V3, 2024): the products of 128 inputs are added up, scaled by both, and added to the sum of the others.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    BlockFP8Weight,
    FP8Weight,
    QuantizedActivations,
    cast_to_fp8,
    quantize_groups,
    quantize_rows,
)
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.torch_internals import block_scaled_mm, scaled_mm
from skiff_runtime.kernels.tuning import tuning_for

ALIGNMENT: Final = 16
"""The inputs and outputs of a weight must be multiples of it for a GPU's FP8 product."""

Activations = torch.Tensor | QuantizedActivations


def quantize_activations(x: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Quantize x [T, n] with one scale for each token; magnitudes beyond ``bound`` become the bound."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.quantize_activations(x, bound)
    return QuantizedActivations(*quantize_rows(x, bound), x.dtype)


def quantize_grouped_activations(x: torch.Tensor) -> QuantizedActivations:
    """Quantize x [T, n] with one scale for each 128 elements of a token."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize_groups as kernel

        return kernel.quantize_groups(x)
    return QuantizedActivations(*quantize_groups(x), x.dtype)


def quantize_static_activations(x: torch.Tensor, scales: torch.Tensor) -> QuantizedActivations:
    """Quantize x [T, n] with the largest of ``scales`` float32 [parts], saturating; all tokens have this scale."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.quantize_static_activations(x, scales)
    scale = scales.amax().view(1, 1)
    values = cast_to_fp8(x.float() * scale.reciprocal())
    return QuantizedActivations(values, scale.expand(len(x), 1).contiguous(), x.dtype)


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bound: float = math.inf,
    other: torch.Tensor | None = None,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return (the quantized ``rms_norm`` of the sum, the sum) of x and residual, both [T, n]; ``other`` as ``add_rms_norm``."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.add_rms_norm_quantize(x, residual, weight, eps, bound, other)
    normed, total = add_rms_norm(x, residual, weight, eps, other=other)
    return quantize_activations(normed, bound), total


def add_rms_norm_quantize_groups(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return (the ``rms_norm`` of the sum quantized in groups of 128, the sum) of x and residual, both [T, n]."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize_groups as kernel

        return kernel.add_rms_norm_quantize_groups(x, residual, weight, eps)
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_grouped_activations(normed), total


def silu_and_mul_quantize(gate_up: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Return ``silu_and_mul`` of gate_up [T, 2n], quantized."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize as kernel

        return kernel.silu_and_mul_quantize(gate_up, bound)
    return quantize_activations(silu_and_mul(gate_up), bound)


def silu_and_mul_quantize_groups(gate_up: torch.Tensor) -> QuantizedActivations:
    """Return ``silu_and_mul`` of gate_up [T, 2n], quantized in groups of 128."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import quantize_groups as kernel

        return kernel.silu_and_mul_quantize_groups(gate_up)
    return quantize_grouped_activations(silu_and_mul(gate_up))


def fp8_linear(
    x: Activations, weight: FP8Weight, bias: torch.Tensor | None = None, *, bound: float = math.inf
) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs].

    Activations that are not quantized yet are quantized here, where magnitudes beyond ``bound`` become the bound.
    """
    if isinstance(x, torch.Tensor) and weight.values.device.type == "cuda":
        from skiff_runtime.kernels.triton.fp8 import fp8_gemv

        if fp8_gemv.can_quantize(x) and fp8_gemv.is_preloading_profitable(weight):
            return fp8_gemv.quantizing_fp8_gemv(x, weight, bias, bound)
    quantized = x if isinstance(x, QuantizedActivations) else quantize_activations(x, bound)
    if weight.values.device.type == "cuda" and quantized.dtype != torch.float32:
        return _gpu_product(quantized, weight, bias)
    product = _multiply_in_float32(quantized, weight.values, weight.scales)
    return (product if bias is None else product + bias.float()).to(quantized.dtype)


def fp8_linear_into(x: Activations, weight: FP8Weight, out: torch.Tensor, *, bound: float = math.inf) -> None:
    """Write ``fp8_linear`` of x [T, inputs] and weight [outputs, inputs] into out [T, outputs], bit for bit; T is large.

    In bfloat16 on a GPU the library writes into ``out``; otherwise the product is computed and copied.
    """
    quantized = x if isinstance(x, QuantizedActivations) else quantize_activations(x, bound)
    if out.device.type == "cuda" and out.dtype == torch.bfloat16 and _is_library_product(quantized, weight):
        _multiply_by_library(quantized, weight, out)
    else:
        out.copy_(fp8_linear(quantized, weight))


def can_fuse_silu_and_mul(x: Activations) -> bool:
    """Return whether ``fused_fp8_linear_silu_and_mul`` computes the product of x, quantized or not yet, and fast."""
    values = x.values if isinstance(x, QuantizedActivations) else x
    if values.device.type != "cuda" or x.dtype == torch.float32 or len(values) != 1:
        return False
    return tuning_for(values.device).fp8_gemv.fuse_silu_and_mul


def fused_fp8_linear_silu_and_mul(
    x: QuantizedActivations, weight: FP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``silu_and_mul`` of ``fp8_linear`` of one token, bit for bit, by one kernel.

    x [1, inputs], weight [2n, inputs] and bias [2n], those of gate before those of up: [1, n]. Only where
    ``can_fuse_silu_and_mul``.
    """
    from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv_silu_and_mul

    return fp8_gemv_silu_and_mul(x, weight, bias)


def can_fuse_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: FP8Weight) -> bool:
    """Return whether ``fused_add_rms_norm_fp8_linear`` takes x and residual [T, inputs], and is fast."""
    if x.device.type != "cuda":
        return False
    from skiff_runtime.kernels.triton.fp8 import add_rms_norm_gemv as kernel

    return kernel.supports(x, residual) and kernel.is_fusion_profitable(weight)


def fused_add_rms_norm_fp8_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: FP8Weight,
    bias: torch.Tensor | None = None,
    *,
    bound: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (``fp8_linear`` of ``add_rms_norm_quantize`` of one token, the sum of x and residual) by one kernel.

    Up to a rounding of the norm. Only where ``can_fuse_add_rms_norm``.
    """
    from skiff_runtime.kernels.triton.fp8.add_rms_norm_gemv import add_rms_norm_fp8_gemv

    return add_rms_norm_fp8_gemv(x, residual, norm_weight, eps, weight, bias, bound)


def multiply_dequantized(x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return x [T, inputs] times FP8 values [outputs, inputs] with scales float32 [outputs], as a CPU computes it."""
    return _multiply_in_float32(x, values, scales).to(x.dtype)


def multiply_dequantized_blocks(
    x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return x [T, inputs], in groups, times FP8 values [outputs, inputs] with a float32 scale for each block.

    As a CPU computes it. ``scales`` has a line for each 128 outputs and at least one column for each 128 inputs.
    """
    return _multiply_blocks_in_float32(x, values, scales).to(x.dtype)


def _multiply_in_float32(x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return F.linear(x.values.float(), values.float()) * x.scales * scales.view(1, -1)


def _multiply_blocks_in_float32(
    x: QuantizedActivations, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    outputs, inputs = values.shape
    weight = values.float()
    for first in range(0, outputs, FP8_BLOCK):  # in place, so that no second matrix in float32 is in memory
        weight[first : first + FP8_BLOCK] *= _spread(
            scales[first // FP8_BLOCK : first // FP8_BLOCK + 1], inputs
        )
    return F.linear(x.values.float() * _spread(x.scales, inputs), weight)


def block_fp8_linear(
    x: QuantizedActivations, weight: BlockFP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [T, inputs], in groups, times weight [outputs, inputs] plus bias [outputs]: [T, outputs]."""
    if weight.values.device.type == "cuda" and x.dtype != torch.float32:
        return _gpu_block_product(x, weight, bias)
    product = _multiply_blocks_in_float32(x, weight.values, weight.scales)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat each column for the 128 elements that it scales; drop what exceeds ``width``."""
    return scales.repeat_interleave(FP8_BLOCK, 1)[:, :width]


def _gpu_block_product(
    x: QuantizedActivations, weight: BlockFP8Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by the GEMV for one token, by stream-K for few, and for many by the library or in tiles.

    The library rounds before a bias is added, and the sum is rounded again; the other kernels round once.
    """
    from skiff_runtime.kernels.triton.fp8 import block_fp8_gemm
    from skiff_runtime.kernels.triton.fp8.block_fp8_gemv import block_fp8_gemv

    if x.values.dtype != E4M3:
        return block_fp8_gemv(x, weight, bias)
    if block_fp8_gemm.is_stream_k_profitable(x, weight):
        return block_fp8_gemm.block_fp8_stream_k_gemm(x, weight, bias)
    if block_fp8_gemm.is_library_usable(x, weight):
        product = block_scaled_mm(x.values, weight.values.T, x.scales, weight.scales.T)
        return product if bias is None else product + bias
    return block_fp8_gemm.block_fp8_gemm(x, weight, bias)


def _gpu_product(x: QuantizedActivations, weight: FP8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the GEMV for one token, stream-K for few, and the library for many."""
    from skiff_runtime.kernels.triton.fp8.fp8_gemv import fp8_gemv
    from skiff_runtime.kernels.triton.fp8.stream_k_gemm import stream_k_gemm

    if x.values.dtype != E4M3:
        return fp8_gemv(x, weight, bias)
    if not _is_library_product(x, weight):
        return stream_k_gemm(x, weight, bias)
    product = _multiply_by_library(x, weight).to(x.dtype)
    return product if bias is None else product + bias


def _is_library_product(x: QuantizedActivations, weight: FP8Weight) -> bool:
    """Return whether a GPU multiplies by the library."""
    from skiff_runtime.kernels.triton.fp8.stream_k_gemm import is_profitable

    return x.values.dtype == E4M3 and not is_profitable(x, weight)


def _multiply_by_library(
    x: QuantizedActivations, weight: FP8Weight, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product in bfloat16, which is ``out`` if given."""
    product: torch.Tensor = scaled_mm(
        x.values,
        weight.values.T,
        scale_a=x.scales,
        scale_b=weight.scales.T,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out,
    )
    return product
