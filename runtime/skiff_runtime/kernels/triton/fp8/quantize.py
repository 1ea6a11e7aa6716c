"""FP8 quantization of activations, fused with the norm or the SwiGLU product that makes them.

The scale of a row is its largest magnitude / 448, the largest FP8 number, so a row's values can be quantized only
when all of them are known. Most kernels here hold a whole row in the registers of one program. A single row would be
the work of one program on an idle GPU: for SwiGLU it is cut into chunks, and quantized in a second launch, when the
largest magnitude of every chunk is known. A single row that is in memory already is cut into chunks if it is wide; each
of their programs reads the whole row, which is in the L2 cache, for its largest magnitude.

The values of a single row are written as float16, though rounded to FP8 numbers: ``fp8_gemv``, which multiplies them,
would only have to convert them back. They are divided by ``FP16_DOWNSCALE``, and the scale is multiplied by it.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP16_DOWNSCALE,
    MIN_SCALE,
    QuantizedActivations,
)
from skiff_runtime.kernels.triton.norm_act.rms_norm import normalize_row
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


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize one row.

    Grid: (rows).

    x                   [rows, WIDTH], rows ``stride`` apart
    values              FP8, or float16 for a single row, [rows, WIDTH], written
    scales              float32 [rows], written
    bound               float: larger magnitudes become it; inf for none
    BLOCK               WIDTH rounded up to a power of two
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * stride + columns, columns < WIDTH, 0.0).to(tl.float32)
    store_row(value, values, scales, row, columns, bound, WIDTH)


@triton.jit
def silu_and_mul_quantize_kernel(
    gate_up: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute SwiGLU's product of one row and quantize it.

    Grid: (rows). The row is held as two blocks: the largest power of two that it fills, and the rest. As one power of
    two, 17,408 elements would take so many registers that a multiprocessor has no room for a second program.

    gate_up             [rows, 2 * WIDTH], rows ``stride`` apart: gates, then the factors
    values, scales, bound  as ``quantize_kernel``
    BLOCK, REST         the largest power of two not above WIDTH, and the rest rounded up to one; 0 if there is none
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = load_silu_and_mul(gate_up + row * stride, columns, WIDTH).to(tl.float32)
    amax = tl.max(tl.abs(value), 0)
    if REST:
        rest_columns = BLOCK + tl.arange(0, REST)
        rest = load_silu_and_mul(gate_up + row * stride, rest_columns, WIDTH).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(rest), 0))
    scale = compute_scale(tl.minimum(amax, bound))
    _store_values(value, scale, values, row, columns, WIDTH)
    if REST:
        _store_values(rest, scale, values, row, rest_columns, WIDTH)
    _store_scale(scale, values, scales, row)


@triton.jit
def add_rms_norm_quantize_kernel(
    x: tl.tensor,
    other: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add the residual to one row, store the sum, and quantize the sum's RMSNorm.

    Grid: (rows). The norm's weight is loaded before the kernel ahead has ended. The norm is rounded to the type of
    the model before and after its weight, as in ``rms_norm_kernel``.

    x, residual         [rows, WIDTH], rows ``x_stride`` and ``residual_stride`` apart
    other, ADD_OTHER    as ``rms_norm_kernel``
    weight              [WIDTH]
    total               [rows, WIDTH], written: the sum, in the type of the model
    eps                 float
    values, scales, bound, BLOCK  as ``quantize_kernel``
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = total.dtype.element_ty
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if ADD_OTHER:
        value += tl.load(other + row * WIDTH + columns, inside, 0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
    value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
    value = value.to(dtype)
    tl.store(total + row * WIDTH + columns, value, inside)
    value = value.to(tl.float32)
    normed = normalize_row(value, weights, eps, WIDTH, dtype).to(tl.float32)
    store_row(normed, values, scales, row, columns, bound, WIDTH)


@triton.jit
def silu_and_mul_amax_kernel(
    gate_up: tl.tensor,
    product: tl.tensor,
    amax: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute SwiGLU's product of one chunk of a single row, and its largest magnitude.

    Grid: (chunks of BLOCK elements).

    gate_up             [2 * WIDTH]
    product             [WIDTH], written, in the type of gate_up
    amax                float32 [chunks], written
    """
    launch_dependents(PDL)
    chunk = tl.program_id(0)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = load_silu_and_mul(gate_up, columns, WIDTH)
    tl.store(product + columns, value, columns < WIDTH)
    tl.store(amax + chunk, tl.max(tl.abs(value.to(tl.float32)), 0))


@triton.jit
def quantize_chunk_kernel(
    product: tl.tensor,
    amax: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize one chunk of a single row, by the largest magnitude of all its chunks.

    Grid: (CHUNKS).

    product             [WIDTH]
    amax                float32 [CHUNKS], as ``silu_and_mul_amax_kernel`` writes them
    values              float16 [WIDTH], written
    scales              float32 [1], written by the first program
    bound               as ``quantize_kernel``
    """
    launch_dependents(PDL)
    chunk = tl.program_id(0)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, CHUNKS_BLOCK)
    wait_for_dependencies(PDL)
    value = tl.load(product + columns, columns < WIDTH, 0.0).to(tl.float32)
    largest = tl.max(tl.load(amax + each, each < CHUNKS, 0.0), 0)
    scale = compute_scale(tl.minimum(largest, bound))
    _store_values(value, scale, values, 0, columns, WIDTH)
    if chunk == 0:
        _store_scale(scale, values, scales, 0)


@triton.jit
def quantize_row_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize one chunk of a single row, by the largest magnitude of the whole row, which each program reads.

    Grid: (chunks of BLOCK elements).

    x                   [WIDTH]
    values              float16 [WIDTH], written
    scales              float32 [1], written by the first program
    bound               as ``quantize_kernel``
    """
    launch_dependents(PDL)
    chunk = tl.program_id(0)
    run = tl.arange(0, BLOCK)
    columns = chunk * BLOCK + run
    wait_for_dependencies(PDL)
    value = tl.load(x + columns, columns < WIDTH, 0.0).to(tl.float32)
    magnitudes = tl.abs(value)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + run
        other = tl.load(x + column, column < WIDTH, 0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, tl.abs(other))
    scale = compute_scale(tl.minimum(tl.max(magnitudes, 0), bound))
    _store_values(value, scale, values, 0, columns, WIDTH)
    if chunk == 0:
        _store_scale(scale, values, scales, 0)


@triton.jit
def quantize_static_kernel(
    x: tl.tensor,
    input_scales: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize one chunk of a row by a scale that the checkpoint holds.

    Grid: (rows, chunks of BLOCK elements).

    x                   [rows, WIDTH], rows ``stride`` apart
    input_scales        float32 [PARTS], of which the largest is taken
    values              FP8, or float16 for a single row, [rows, WIDTH], written
    scales              float32 [rows], written by the first program of a row
    PARTS_BLOCK         PARTS rounded up to a power of two
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS_BLOCK)
    scale = tl.max(tl.load(input_scales + part, part < PARTS, 0.0), 0)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * stride + columns, columns < WIDTH, 0.0).to(tl.float32)
    _store_values(value, scale, values, row, columns, WIDTH)
    if tl.program_id(1) == 0:
        _store_scale(scale, values, scales, row)


@triton.jit
def compute_scale(amax: tl.tensor) -> tl.tensor:
    """Return the scale with which ``amax`` becomes the largest FP8 number."""
    return tl.maximum(tl.div_rn(amax, _FP8_MAX), _MIN_SCALE)


@triton.jit
def _store_values(
    value: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Quantize columns of a row with its scale and store them, as FP8 or as smaller float16."""
    scaled = value * tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
    quantized = scaled.to(tl.float8e4nv)
    if values.dtype.element_ty == tl.float16:
        quantized = (quantized.to(tl.float32) / _FP16_DOWNSCALE).to(tl.float16)
    tl.store(values + row * WIDTH + columns, quantized, columns < WIDTH)


@triton.jit
def _store_scale(scale: tl.tensor, values: tl.tensor, scales: tl.tensor, row: tl.tensor) -> None:
    """Store the scale of a row, larger where its values are smaller."""
    if values.dtype.element_ty == tl.float16:
        scale = scale * _FP16_DOWNSCALE
    tl.store(scales + row, scale)


@triton.jit
def store_row(
    value: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Quantize a whole row; store it and its scale."""
    scale = compute_scale(tl.minimum(tl.max(tl.abs(value), 0), bound))
    _store_values(value, scale, values, row, columns, WIDTH)
    _store_scale(scale, values, scales, row)


def quantize_activations(x: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Do what ``kernels.fp8.quantize_activations`` does."""
    rows, width = x.shape
    quantized, tuning = empty_quantized(x, width), tuning_for(x.device)
    if rows == 1 and width > tuning.single_row_max_block:
        quantize_row_kernel[(triton.cdiv(width, tuning.single_row_chunk),)](
            *(x, quantized.values, quantized.scales, bound),
            WIDTH=width,
            BLOCK=tuning.single_row_chunk,
            num_warps=tuning.single_row_warps,
            **pdl_options(x.device),
        )
    elif rows:
        numbers = x.stride(0), bound
        quantize_kernel[(rows,)](x, quantized.values, quantized.scales, *numbers, **row_options(x, width))
    return quantized


def quantize_static_activations(x: torch.Tensor, scales: torch.Tensor) -> QuantizedActivations:
    """Do what ``kernels.fp8.quantize_static_activations`` does."""
    rows, width = x.shape
    quantized = empty_quantized(x, width)
    tuning = tuning_for(x.device)
    if rows:
        quantize_static_kernel[(rows, triton.cdiv(width, tuning.single_row_chunk))](
            *(x, scales, quantized.values, quantized.scales, x.stride(0)),
            WIDTH=width,
            BLOCK=tuning.single_row_chunk,
            PARTS=len(scales),
            PARTS_BLOCK=triton.next_power_of_2(len(scales)),
            num_warps=tuning.single_row_warps,
            **pdl_options(x.device),
        )
    return quantized


def silu_and_mul_quantize(gate_up: torch.Tensor, bound: float = math.inf) -> QuantizedActivations:
    """Do what ``kernels.fp8.silu_and_mul_quantize`` does."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    quantized = empty_quantized(gate_up, width)
    if rows == 1:
        _silu_and_mul_quantize_single_row(gate_up, quantized, bound)
    elif rows:
        block = 1 << (width.bit_length() - 1)
        silu_and_mul_quantize_kernel[(rows,)](
            *(gate_up, quantized.values, quantized.scales, gate_up.stride(0), bound),
            WIDTH=width,
            BLOCK=block,
            REST=triton.next_power_of_2(width - block) if width > block else 0,
            **_launch_options(gate_up, width),
        )
    return quantized


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bound: float = math.inf,
    other: torch.Tensor | None = None,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Do what ``kernels.fp8.add_rms_norm_quantize`` does."""
    rows, width = x.shape
    quantized = empty_quantized(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        add_rms_norm_quantize_kernel[(rows,)](
            x,
            x if other is None else other,
            residual,
            weight,
            total,
            quantized.values,
            quantized.scales,
            x.stride(0),
            residual.stride(0),
            eps,
            bound,
            ADD_OTHER=other is not None,
            **row_options(x, width),
        )
    return quantized, total


def _silu_and_mul_quantize_single_row(
    gate_up: torch.Tensor, quantized: QuantizedActivations, bound: float
) -> None:
    """Fill ``quantized`` [1, width] from gate_up [1, 2 * width], in two launches of many programs."""
    width, device = quantized.values.shape[1], gate_up.device
    tuning = tuning_for(device)
    chunks = triton.cdiv(width, tuning.single_row_chunk)
    product = torch.empty(width, dtype=gate_up.dtype, device=device)
    amax = torch.empty(chunks, dtype=torch.float32, device=device)
    options = {
        "WIDTH": width,
        "BLOCK": tuning.single_row_chunk,
        "num_warps": tuning.single_row_warps,
        **pdl_options(device),
    }
    silu_and_mul_amax_kernel[(chunks,)](gate_up, product, amax, **options)
    quantize_chunk_kernel[(chunks,)](
        *(product, amax, quantized.values, quantized.scales, bound),
        CHUNKS=chunks,
        CHUNKS_BLOCK=triton.next_power_of_2(chunks),
        **options,
    )


def empty_quantized(like: torch.Tensor, width: int) -> QuantizedActivations:
    """Allocate quantized activations of ``width`` columns for as many rows as ``like`` has."""
    rows = like.shape[0]
    values = torch.empty((rows, width), dtype=torch.float16 if rows == 1 else E4M3, device=like.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=like.device)
    return QuantizedActivations(values, scales, like.dtype)


def row_options(source: torch.Tensor, width: int) -> dict[str, Any]:
    """Return the launch options of kernels that hold a whole row, made of ``source``, as one block."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), **_launch_options(source, width)}


def _launch_options(source: torch.Tensor, width: int) -> dict[str, Any]:
    warps = min(MAX_WARPS, max(1, triton.next_power_of_2(width) // ELEMENTS_PER_WARP))
    return {"num_warps": warps, **pdl_options(source.device)}
