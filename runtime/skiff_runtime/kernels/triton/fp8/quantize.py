"""Rounding to e4m3 with one scale for each row: of what is there, or of what is made on the way."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import E4M3, QuantizedActivations
from skiff_runtime.kernels.triton.fp8.fp8_row import quantize_single_row
from skiff_runtime.kernels.triton.fp8.rounding import scale_of, store, store_row, store_scale
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_mul
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

MAX_WARPS = 32
WARP_ELEMENTS = 512


@triton.jit
def _round(
    values: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = tl.load(values + row * stride + columns, columns < WIDTH, 0.0).to(tl.float32)
    store_row(value, rounded, scales, row, columns, bound, WIDTH)


@triton.jit
def silu_and_mul_quantize_kernel(
    gate_up: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A row in registers: the largest power of two that it has room for, and what is left.

    As one power of two, 17,408 numbers would leave no room on a processor for a second program.
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = silu_mul(gate_up + row * stride, columns, WIDTH).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    if REST:
        others = BLOCK + tl.arange(0, REST)
        beside = silu_mul(gate_up + row * stride, others, WIDTH).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(beside), 0))
    scale = scale_of(largest, bound)
    store(value, scale, rounded, row, columns, WIDTH)
    if REST:
        store(beside, scale, rounded, row, others, WIDTH)
    store_scale(scale, rounded, scales, row)


@triton.jit
def add_rms_norm_quantize_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind = total.dtype.element_ty
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
    value = value.to(kind)
    tl.store(total + row * WIDTH + columns, value, inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = ((value * scale).to(kind).to(tl.float32) * weights).to(kind).to(tl.float32)
    store_row(normed, rounded, scales, row, columns, bound, WIDTH)


def quantize_activations(x: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """As ``kernels.fp8.quantize_activations``."""
    rounded = _empty(x, x.shape[1])
    if x.shape[0]:
        numbers = x.stride(0), bound
        _round[(x.shape[0],)](x, rounded.values, rounded.scales, *numbers, **_shape(x, x.shape[1]))
    return rounded


def silu_and_mul_quantize(gate_up: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """As ``kernels.fp8.silu_and_mul_quantize``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rounded = _empty(gate_up, width)
    if rows == 1:
        quantize_single_row(gate_up, rounded, bound)
    elif rows:
        block = 1 << (width.bit_length() - 1)
        silu_and_mul_quantize_kernel[(rows,)](
            *(gate_up, rounded.values, rounded.scales, gate_up.stride(0), bound),
            WIDTH=width,
            BLOCK=block,
            REST=triton.next_power_of_2(width - block) if width > block else 0,
            **_launch(gate_up, width),
        )
    return rounded


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bound: float = math.inf
) -> tuple[QuantizedActivations, torch.Tensor]:
    """As ``kernels.fp8.add_rms_norm_quantize``."""
    rows, width = x.shape
    rounded = _empty(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        add_rms_norm_quantize_kernel[(rows,)](
            x,
            residual,
            weight,
            total,
            rounded.values,
            rounded.scales,
            x.stride(0),
            residual.stride(0),
            eps,
            bound,
            **_shape(x, width),
        )
    return rounded, total


def _empty(like: torch.Tensor, width: int) -> QuantizedActivations:
    rows = like.shape[0]
    values = torch.empty((rows, width), dtype=torch.float16 if rows == 1 else E4M3, device=like.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=like.device)
    return QuantizedActivations(values, scales, like.dtype)


def _shape(source: torch.Tensor, width: int) -> dict[str, Any]:
    """How a program works on a row of this width, made of ``source``."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), **_launch(source, width)}


def _launch(source: torch.Tensor, width: int) -> dict[str, Any]:
    warps = min(MAX_WARPS, max(1, triton.next_power_of_2(width) // WARP_ELEMENTS))
    return {"num_warps": warps, **pdl_options(source.device)}
