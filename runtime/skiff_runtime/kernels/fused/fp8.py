"""Rounding to e4m3 with one scale for each row: of what is there, or of what is made in the same launch."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import E4M3, LARGEST, SHRINK, SMALLEST_SCALE, Rounded
from skiff_runtime.kernels.fused.activation import silu_mul
from skiff_runtime.kernels.fused.overlap import await_previous, launch_options, let_next_start

_LARGEST = tl.constexpr(LARGEST)
_SHRINK = tl.constexpr(SHRINK)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
MAX_WARPS = 32
WARP_ELEMENTS = 512
PART = 1024
PART_WARPS = 4
"""Of a single row, how much a program works on, and by how many warps."""


@triton.jit
def _store_row(
    value: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    scale = _scale_of(tl.max(tl.abs(value), 0), bound)
    _store(value, scale, rounded, row, columns, WIDTH)
    _store_scale(scale, rounded, scales, row)


@triton.jit
def _scale_of(largest: tl.tensor, bound: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.div_rn(tl.minimum(largest, bound), _LARGEST), _SMALLEST_SCALE)


@triton.jit
def _store(
    value: tl.tensor,
    scale: tl.tensor,
    rounded: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    scaled = value * tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    short = scaled.to(tl.float8e4nv)
    if rounded.dtype.element_ty == tl.float16:
        short = (short.to(tl.float32) / _SHRINK).to(tl.float16)
    tl.store(rounded + row * WIDTH + columns, short, columns < WIDTH)


@triton.jit
def _store_scale(scale: tl.tensor, rounded: tl.tensor, scales: tl.tensor, row: tl.tensor) -> None:
    if rounded.dtype.element_ty == tl.float16:
        scale = scale * _SHRINK
    tl.store(scales + row, scale)


@triton.jit
def _round(
    values: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    await_previous(EARLY)
    value = tl.load(values + row * stride + columns, columns < WIDTH, 0.0).to(tl.float32)
    _store_row(value, rounded, scales, row, columns, bound, WIDTH)


@triton.jit
def _silu_mul_and_round(
    gate_up: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A row in registers: the largest power of two that it has room for, and what is left.

    As one power of two, 17,408 numbers would leave no room on a processor for a second program.
    """
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    await_previous(EARLY)
    value = silu_mul(gate_up + row * stride, columns, WIDTH).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    if REST:
        others = BLOCK + tl.arange(0, REST)
        beside = silu_mul(gate_up + row * stride, others, WIDTH).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(beside), 0))
    scale = _scale_of(largest, bound)
    _store(value, scale, rounded, row, columns, WIDTH)
    if REST:
        _store(beside, scale, rounded, row, others, WIDTH)
    _store_scale(scale, rounded, scales, row)


@triton.jit
def _silu_mul_and_compare(
    gate_up: tl.tensor,
    values: tl.tensor,
    largest: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    part = tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    await_previous(EARLY)
    value = silu_mul(gate_up, columns, WIDTH)
    tl.store(values + columns, value, columns < WIDTH)
    tl.store(largest + part, tl.max(tl.abs(value.to(tl.float32)), 0))


@triton.jit
def _round_part(
    values: tl.tensor,
    largest: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    part = tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, PARTS_BLOCK)
    await_previous(EARLY)
    value = tl.load(values + columns, columns < WIDTH, 0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.load(largest + each, each < PARTS, 0.0), 0), bound)
    _store(value, scale, rounded, 0, columns, WIDTH)
    if part == 0:
        _store_scale(scale, rounded, scales, 0)


@triton.jit
def _add_norm_and_round(
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
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind = total.dtype.element_ty
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    await_previous(EARLY)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
    value = value.to(kind)
    tl.store(total + row * WIDTH + columns, value, inside)
    value = value.to(tl.float32)
    squares, largest = tl.reduce((value * value, tl.abs(value * weights)), 0, _add_and_compare)
    root = tl.rsqrt(squares / WIDTH + eps)
    normed = ((value * root).to(kind).to(tl.float32) * weights).to(kind).to(tl.float32)
    scale = _scale_of((largest * root).to(kind).to(tl.float32), bound)
    _store(normed, scale, rounded, row, columns, WIDTH)
    _store_scale(scale, rounded, scales, row)


@triton.jit
def _add_and_compare(
    sum_: tl.tensor, largest: tl.tensor, addend: tl.tensor, other: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return sum_ + addend, tl.maximum(largest, other)


def round_activations(x: torch.Tensor, bound: float = math.inf) -> Rounded:
    """As ``kernels.fp8.round_activations``."""
    rounded = _empty(x, x.shape[1])
    if x.shape[0]:
        numbers = x.stride(0), bound
        _round[(x.shape[0],)](x, rounded.values, rounded.scales, *numbers, **_shape(x, x.shape[1]))
    return rounded


def silu_mul_and_round(gate_up: torch.Tensor, bound: float = math.inf) -> Rounded:
    """As ``kernels.fp8.silu_mul_and_round``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rounded = _empty(gate_up, width)
    if rows == 1:  # which one program would take longer for than many do in two launches
        _of_one_row(gate_up, rounded, bound)
        return rounded
    if rows:
        block = 1 << (width.bit_length() - 1)
        _silu_mul_and_round[(rows,)](
            *(gate_up, rounded.values, rounded.scales, gate_up.stride(0), bound),
            WIDTH=width,
            BLOCK=block,
            REST=triton.next_power_of_2(width - block) if width > block else 0,
            **_launch(gate_up, width),
        )
    return rounded


def _of_one_row(gate_up: torch.Tensor, rounded: Rounded, bound: float) -> None:
    width = rounded.values.shape[1]
    parts = triton.cdiv(width, PART)
    values = torch.empty(width, dtype=gate_up.dtype, device=gate_up.device)
    largest = torch.empty(parts, dtype=torch.float32, device=gate_up.device)
    options = {"WIDTH": width, "BLOCK": PART, "num_warps": PART_WARPS, **launch_options(gate_up.device)}
    _silu_mul_and_compare[(parts,)](gate_up, values, largest, **options)
    _round_part[(parts,)](
        *(values, largest, rounded.values, rounded.scales, bound),
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        **options,
    )


def add_norm_and_round(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bound: float = math.inf
) -> tuple[Rounded, torch.Tensor]:
    """As ``kernels.fp8.add_norm_and_round``."""
    rows, width = x.shape
    rounded = _empty(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        _add_norm_and_round[(rows,)](
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


def _empty(like: torch.Tensor, width: int) -> Rounded:
    rows = like.shape[0]
    values = torch.empty((rows, width), dtype=torch.float16 if rows == 1 else E4M3, device=like.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=like.device)
    return Rounded(values, scales, like.dtype)


def _shape(source: torch.Tensor, width: int) -> dict[str, Any]:
    """How a program works on a row of this width, made of ``source``."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), **_launch(source, width)}


def _launch(source: torch.Tensor, width: int) -> dict[str, Any]:
    warps = min(MAX_WARPS, max(1, triton.next_power_of_2(width) // WARP_ELEMENTS))
    return {"num_warps": warps, **launch_options(source.device)}
