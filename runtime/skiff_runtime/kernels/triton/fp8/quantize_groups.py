"""FP8 quantization of activations in groups of 128, fused with the norm or the SwiGLU product that makes them.

A group's scale is its largest magnitude / 448. Other than a row's, it needs no more than the group itself: alone, and
after SwiGLU, a row is quantized by as many programs as it has runs of groups. RMSNorm needs the whole row, which one
program holds.

Scales are written with the tokens of a group beside each other, as the GPU's library reads them. As in ``quantize``,
the values of a single row are float16, divided by ``FP16_DOWNSCALE``.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP16_DOWNSCALE,
    MIN_SCALE,
    QuantizedActivations,
)
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import load_silu_and_mul
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import tuning_for

MAX_WARPS: Final = 32
ELEMENTS_PER_WARP: Final = 512
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_GROUP = tl.constexpr(FP8_BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def quantize_groups_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize GROUPS groups of one row.

    Grid: (rows, runs of GROUPS groups).

    x                   [tokens, WIDTH], rows ``stride`` apart
    values              FP8, or float16 for a single row, [tokens, WIDTH], written
    scales              float32 [groups, tokens], written
    GROUPS              a power of two
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    wait_for_dependencies(PDL)
    value = tl.load(x + row * stride + columns, columns < WIDTH, 0.0).to(tl.float32)
    _store_groups(value, values, scales, row, tokens, group, columns, WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def silu_and_mul_quantize_groups_kernel(
    gate_up: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute GROUPS groups of SwiGLU's product of one row, and quantize them.

    Grid: (rows, runs of GROUPS groups).

    gate_up             [tokens, 2 * WIDTH], rows ``stride`` apart: gates, then the factors
    values, scales, GROUPS  as ``quantize_groups_kernel``
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    wait_for_dependencies(PDL)
    value = load_silu_and_mul(gate_up + row * stride, columns, WIDTH).to(tl.float32)
    _store_groups(value, values, scales, row, tokens, group, columns, WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def add_rms_norm_quantize_groups_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add the residual to one row, store the sum, and quantize the sum's RMSNorm in groups.

    Grid: (rows). The norm's weight is loaded before the kernel ahead has ended. The norm is rounded to the type of
    the model before and after its weight, as in ``rms_norm_kernel``.

    x, residual         [tokens, WIDTH], rows ``x_stride`` and ``residual_stride`` apart
    weight              [WIDTH]
    total               [tokens, WIDTH], written: the sum, in the type of the model
    eps                 float
    values, scales      as ``quantize_groups_kernel``
    GROUPS              the groups of a row, rounded up to a power of two
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    columns = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = columns < WIDTH
    dtype = total.dtype.element_ty
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
    value = value.to(dtype)
    tl.store(total + row * WIDTH + columns, value, inside)
    value = value.to(tl.float32)
    rms_scale = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / WIDTH + eps)
    normed = ((value * rms_scale).to(dtype).to(tl.float32) * weights).to(dtype).to(tl.float32)
    _store_groups(normed, values, scales, row, tokens, group, columns, WIDTH)


@triton.jit
def _store_groups(
    value: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    tokens: tl.tensor,
    group: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Quantize ``value`` [groups, 128] of a row; store it, as FP8 or as smaller float16, and its scales."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 1), _FP8_MAX), _MIN_SCALE)
    scaled = value * tl.div_rn(1.0, scale)[:, None]
    quantized = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)
    if values.dtype.element_ty == tl.float16:
        quantized = (quantized.to(tl.float32) / _FP16_DOWNSCALE).to(tl.float16)
        scale = scale * _FP16_DOWNSCALE
    tl.store(values + row * WIDTH + columns, quantized, columns < WIDTH)
    tl.store(scales + group.to(tl.int64) * tokens + row, scale, group * _GROUP < WIDTH)


def quantize_groups(x: torch.Tensor) -> QuantizedActivations:
    """Do what ``kernels.fp8.quantize_grouped_activations`` does."""
    rows, width = x.shape
    quantized = _empty(x, width)
    if rows:
        grid, options = _chunks(x, width)
        quantize_groups_kernel[grid](
            x, quantized.values, quantized.scales, x.stride(0), rows, WIDTH=width, **options
        )
    return quantized


def silu_and_mul_quantize_groups(gate_up: torch.Tensor) -> QuantizedActivations:
    """Do what ``kernels.fp8.silu_and_mul_quantize_groups`` does."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    quantized = _empty(gate_up, width)
    if rows:
        grid, options = _chunks(gate_up, width)
        silu_and_mul_quantize_groups_kernel[grid](
            gate_up, quantized.values, quantized.scales, gate_up.stride(0), rows, WIDTH=width, **options
        )
    return quantized


def add_rms_norm_quantize_groups(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Do what ``kernels.fp8.add_rms_norm_quantize_groups`` does."""
    rows, width = x.shape
    quantized = _empty(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        groups = triton.next_power_of_2(triton.cdiv(width, FP8_BLOCK))
        warps = min(MAX_WARPS, max(1, groups * FP8_BLOCK // ELEMENTS_PER_WARP))
        add_rms_norm_quantize_groups_kernel[(rows,)](
            *(x, residual, weight, total, quantized.values, quantized.scales),
            *(x.stride(0), residual.stride(0), rows, eps),
            WIDTH=width,
            GROUPS=groups,
            num_warps=warps,
            **pdl_options(x.device),
        )
    return quantized, total


def _empty(like: torch.Tensor, width: int) -> QuantizedActivations:
    rows = like.shape[0]
    values = torch.empty((rows, width), dtype=torch.float16 if rows == 1 else E4M3, device=like.device)
    scales = torch.empty((triton.cdiv(width, FP8_BLOCK), rows), dtype=torch.float32, device=like.device)
    return QuantizedActivations(values, scales.T, like.dtype)


def _chunks(source: torch.Tensor, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and options of a launch whose programs quantize runs of groups of a row made of ``source``."""
    tuning, groups = tuning_for(source.device), triton.cdiv(width, FP8_BLOCK)
    run = min(triton.next_power_of_2(groups), max(1, tuning.single_row_chunk // FP8_BLOCK))
    options = {"GROUPS": run, "num_warps": tuning.single_row_warps, **pdl_options(source.device)}
    return (source.shape[0], triton.cdiv(groups, run)), options
