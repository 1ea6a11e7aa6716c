"""FP8 GEMV: the product of one token with an FP8 weight, nearly as fast as the weight can be read.

Like ``triton.linear.gemv``, with one more problem: reading a byte takes so little time that what is done with it
counts. So eight weights at a time are dequantized to float16, multiplied by float16 activations and added up in fours
there; these sums are added in float32. To dequantize each weight to float32 by itself takes three instructions, and
29.6 µs instead of 23.5 for 5120 x 17408 on an H200.

As there, the product with a gated MLP's weight of gate and up has a kernel that applies SwiGLU as well.

A small weight is loaded as a whole before the kernel ahead has ended: a program keeps all its rows in registers. Where
no kernel ahead quantizes the token, such as attention, these programs do it themselves.
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP8Weight, QuantizedActivations
from skiff_runtime.kernels.triton.fp8 import fused_quantize
from skiff_runtime.kernels.triton.fp8.dequantize import dot_fp8x8, supports_fp8_ptx
from skiff_runtime.kernels.triton.fp8.preloaded_rows import dot_rows, load_rows, load_token, quantize_token
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import multiply_by_silu
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors
from skiff_runtime.kernels.tuning import FP8GemvTile, PreloadingGemvTile, tuning_for

EIGHT: Final = tl.constexpr(8)
"""FP8 numbers in an int64, in which they are loaded."""


@triton.jit
def fp8_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scale: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with two adjacent rows of the weight, COLUMNS columns at a time.

    Grid: (pairs of rows). The first columns of the weight, which no kernel writes, are loaded before the kernel ahead
    has ended.

    x                   float16 [INPUTS]: FP8 values divided by ``FP16_DOWNSCALE``
    weight              FP8 [outputs, INPUTS], rows ``weight_stride`` apart; INPUTS is a multiple of 8
    x_scale             float32 [1]
    scales              float32 [outputs]
    bias                [outputs]; not read without HAS_BIAS
    output              [outputs], written, in the type of the model
    """
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // EIGHT
    RUN: tl.constexpr = COLUMNS // EIGHT
    row = tl.program_id(0) * 2
    other = tl.minimum(row + 1, outputs - 1)
    x = x.to(tl.pointer_type(tl.int64))
    source = (weight + row.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    other_source = (weight + other.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    run = tl.arange(0, RUN)
    inside = run < EIGHTS
    first_weights = tl.load(source + run, inside, 0)
    other_first_weights = tl.load(other_source + run, inside, 0)
    wait_for_dependencies(PDL)
    x_low, x_high = tl.load(x + 2 * run, inside, 0), tl.load(x + 2 * run + 1, inside, 0)
    acc = dot_fp8x8(first_weights, x_low, x_high, USE_PTX)
    other_acc = dot_fp8x8(other_first_weights, x_low, x_high, USE_PTX)
    for first in range(RUN, EIGHTS, RUN):
        at = first + run
        inside = at < EIGHTS
        x_low, x_high = tl.load(x + 2 * at, inside, 0), tl.load(x + 2 * at + 1, inside, 0)
        acc += dot_fp8x8(tl.load(source + at, inside, 0), x_low, x_high, USE_PTX)
        other_acc += dot_fp8x8(tl.load(other_source + at, inside, 0), x_low, x_high, USE_PTX)
    scale = tl.load(x_scale)
    _store_output(acc, scale, scales, bias, output, row, outputs, HAS_BIAS)
    _store_output(other_acc, scale, scales, bias, output, row + 1, outputs, HAS_BIAS)


@triton.jit
def preloading_fp8_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scale: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    bound: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with ROWS adjacent rows of the weight; with GATED, with those of gate and of up.

    Grid: (runs of ROWS outputs). All rows of a program are loaded before the kernel ahead has ended. A row's sum has an
    order that follows from COLUMNS and the warps alone: neither QUANTIZE nor GATED changes its bits.

    x                   with QUANTIZE bfloat16 or float16 [INPUTS], quantized here; else as ``fp8_gemv_kernel``
    x_scale             as ``fp8_gemv_kernel``; not read with QUANTIZE
    weight, scales, bias, output  as ``fp8_gemv_kernel``; with GATED as ``fp8_gemv_silu_and_mul_kernel``
    bound               float: with QUANTIZE, larger magnitudes become it; inf for none
    """
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // EIGHT
    RUN: tl.constexpr = COLUMNS // EIGHT
    LOADED: tl.constexpr = 2 * ROWS if GATED else ROWS
    INPUT_DTYPE: tl.constexpr = x.dtype.element_ty
    first_row = tl.program_id(0) * ROWS
    rows, row_scales, biases = no_tensors(), no_tensors(), no_tensors()
    for i in tl.static_range(LOADED):
        # The last rows may not exist; what they give is not stored. Those of up lie behind those of gate.
        rows += (tl.minimum(first_row + i % ROWS, outputs - 1) + i // ROWS * outputs,)
    loaded = load_rows(weight, weight_stride, rows, EIGHTS, RUN)
    for i in tl.static_range(LOADED):
        row_scales += (tl.load(scales + rows[i]),)
        if HAS_BIAS:
            biases += (tl.load(bias + rows[i]),)
    wait_for_dependencies(PDL)
    lows, highs = load_token(x, EIGHTS, RUN)
    if QUANTIZE:
        lows, highs, scale = quantize_token(lows, highs, bound, INPUT_DTYPE, USE_PTX)
    else:
        scale = tl.load(x_scale)
    accs = dot_rows(loaded, lows, highs, LOADED, USE_PTX)
    dtype = output.dtype.element_ty
    products = no_tensors()
    for i in tl.static_range(LOADED):
        product = tl.sum(accs[i], 0) * (scale * row_scales[i])
        if HAS_BIAS:
            product += biases[i].to(tl.float32)
        products += (product.to(dtype),)
    for i in tl.static_range(ROWS):
        product = products[i]
        if GATED:
            product = multiply_by_silu(product.to(tl.float32), products[ROWS + i].to(tl.float32), dtype)
        tl.store(output + first_row + i, product, first_row + i < outputs)


@triton.jit
def _store_output(
    acc: tl.tensor,
    scale: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Add up one row's sums, scale them, add the bias and store the output, if there is such a row."""
    inside = row < outputs
    product = tl.sum(acc, 0) * (scale * tl.load(scales + row, inside, 0.0))
    if HAS_BIAS:
        product += tl.load(bias + row, inside, 0.0).to(tl.float32)
    tl.store(output + row, product.to(output.dtype.element_ty), inside)


@triton.jit
def fp8_gemv_silu_and_mul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scale: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with one row of gate and the same one of up; store silu(gate) * up.

    Grid: (outputs). The sum of each row is that of ``fp8_gemv_kernel`` with the same COLUMNS and warps and is rounded
    as it is stored there: the result has the bits of ``fp8_gemv_kernel`` followed by ``silu_and_mul_kernel``.

    x, x_scale          as ``fp8_gemv_kernel``
    weight              FP8 [2 * outputs, INPUTS], rows ``weight_stride`` apart: those of gate, then those of up
    scales              float32 [2 * outputs]
    bias                [2 * outputs]; not read without HAS_BIAS
    output              [outputs], written, in the type of the model
    """
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // EIGHT
    RUN: tl.constexpr = COLUMNS // EIGHT
    row = tl.program_id(0)
    up_row = row + outputs
    x = x.to(tl.pointer_type(tl.int64))
    gate_source = (weight + row.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    up_source = (weight + up_row.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    run = tl.arange(0, RUN)
    inside = run < EIGHTS
    first_gate_weights = tl.load(gate_source + run, inside, 0)
    first_up_weights = tl.load(up_source + run, inside, 0)
    gate_scale, up_scale = tl.load(scales + row), tl.load(scales + up_row)
    wait_for_dependencies(PDL)
    x_low, x_high = tl.load(x + 2 * run, inside, 0), tl.load(x + 2 * run + 1, inside, 0)
    gate_acc = dot_fp8x8(first_gate_weights, x_low, x_high, USE_PTX)
    up_acc = dot_fp8x8(first_up_weights, x_low, x_high, USE_PTX)
    for first in range(RUN, EIGHTS, RUN):
        at = first + run
        inside = at < EIGHTS
        x_low, x_high = tl.load(x + 2 * at, inside, 0), tl.load(x + 2 * at + 1, inside, 0)
        gate_acc += dot_fp8x8(tl.load(gate_source + at, inside, 0), x_low, x_high, USE_PTX)
        up_acc += dot_fp8x8(tl.load(up_source + at, inside, 0), x_low, x_high, USE_PTX)
    scale = tl.load(x_scale)
    gate = tl.sum(gate_acc, 0) * (scale * gate_scale)
    up = tl.sum(up_acc, 0) * (scale * up_scale)
    if HAS_BIAS:
        gate += tl.load(bias + row).to(tl.float32)
        up += tl.load(bias + up_row).to(tl.float32)
    dtype = output.dtype.element_ty
    product = multiply_by_silu(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    tl.store(output + row, product)


def fp8_gemv(
    x: QuantizedActivations,
    weight: FP8Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: FP8GemvTile | PreloadingGemvTile | None = None,
) -> torch.Tensor:
    """Return x [1, inputs] times weight [outputs, inputs] plus bias [outputs]: [1, outputs].

    The values of ``x`` are those of a single token: float16, see ``QuantizedActivations``. ``tile`` replaces the
    tuned one, and its type chooses the kernel. The two kernels add a row's products up in different orders.
    """
    outputs, inputs = weight.values.shape
    tile = tile or _choose_tile(weight)
    if isinstance(tile, PreloadingGemvTile):
        return _launch_preloading(x, weight, bias, math.inf, tile, gated=False)
    output = torch.empty((1, outputs), dtype=x.dtype, device=x.values.device)
    fp8_gemv_kernel[(triton.cdiv(outputs, 2),)](
        *(x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, weight.values.stride(0), outputs),
        INPUTS=inputs,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        USE_PTX=supports_fp8_ptx(x.values.device),
        num_warps=tile.warps,
        **pdl_options(x.values.device),
    )
    return output


def fp8_gemv_silu_and_mul(
    x: QuantizedActivations,
    weight: FP8Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: FP8GemvTile | PreloadingGemvTile | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [1, n] of x [1, inputs] times weight [2 * n, inputs] plus bias [2 * n]: gate, then up.

    The values of ``x`` are those of a single token, as for ``fp8_gemv``. The result has the bits of ``fp8_gemv`` with
    the same ``tile``, which replaces the tuned one, and ``silu_and_mul``.
    """
    rows, inputs = weight.values.shape
    tile = tile or _choose_tile(weight)
    if isinstance(tile, PreloadingGemvTile):
        return _launch_preloading(x, weight, bias, math.inf, tile, gated=True)
    output = torch.empty((1, rows // 2), dtype=x.dtype, device=x.values.device)
    fp8_gemv_silu_and_mul_kernel[(rows // 2,)](
        *(x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, weight.values.stride(0), rows // 2),
        INPUTS=inputs,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        USE_PTX=supports_fp8_ptx(x.values.device),
        num_warps=tile.warps,
        **pdl_options(x.values.device),
    )
    return output


def quantizing_fp8_gemv(
    x: torch.Tensor,
    weight: FP8Weight,
    bias: torch.Tensor | None = None,
    bound: float = math.inf,
    *,
    tile: PreloadingGemvTile | None = None,
) -> torch.Tensor:
    """Return x [1, inputs], quantized, times weight [outputs, inputs] plus bias [outputs]: [1, outputs].

    The token is quantized like ``quantize_activations(x, bound)``, in the same launch; the result has the bits of that
    and ``fp8_gemv`` with the same ``tile``. ``can_quantize`` must hold.
    """
    tile = tile or tuning_for(x.device).fp8_gemv.preloading_tile
    return _launch_preloading(x, weight, bias, bound, tile, gated=False)


def _launch_preloading(
    x: torch.Tensor | QuantizedActivations,
    weight: FP8Weight,
    bias: torch.Tensor | None,
    bound: float,
    tile: PreloadingGemvTile,
    *,
    gated: bool,
) -> torch.Tensor:
    (rows, inputs), device = weight.values.shape, weight.values.device
    values, x_scale = (x.values, x.scales) if isinstance(x, QuantizedActivations) else (x, weight.scales)
    outputs = rows // 2 if gated else rows
    rows_of_program = max(1, tile.rows // 2) if gated else tile.rows
    needed = fused_quantize.choose_warps(inputs)
    assert needed is not None, "too many inputs for the registers of one program"
    warps = max(tile.warps, needed)
    # With more warps than the tile has, each thread still loads eight activations at a time.
    columns = tile.columns if warps == tile.warps else max(tile.columns, warps * 32 * 8)
    output = torch.empty((1, outputs), dtype=x.dtype, device=device)
    preloading_fp8_gemv_kernel[(triton.cdiv(outputs, rows_of_program),)](
        *(values, weight.values, x_scale, weight.scales, weight.scales if bias is None else bias),
        *(output, weight.values.stride(0), outputs, bound),
        INPUTS=inputs,
        COLUMNS=min(columns, triton.next_power_of_2(inputs)),
        ROWS=rows_of_program,
        QUANTIZE=values is x,
        GATED=gated,
        HAS_BIAS=bias is not None,
        USE_PTX=supports_fp8_ptx(device),
        num_warps=warps,
        **pdl_options(device),
    )
    return output


def can_quantize(x: torch.Tensor) -> bool:
    """Return whether ``quantizing_fp8_gemv`` supports x [T, inputs]."""
    is_supported = len(x) == 1 and fused_quantize.supports(x.dtype) and x.is_contiguous()
    return is_supported and fused_quantize.choose_warps(x.shape[1]) is not None


def is_preloading_profitable(weight: FP8Weight) -> bool:
    """Return whether the weight is so small that most of its programs, with all their rows, are resident at a time.

    Then the weight is read while the kernel ahead runs, and to quantize the token once more in each of these programs
    takes less time than a launch.
    """
    tuning = tuning_for(weight.values.device).fp8_gemv
    is_small = weight.values.numel() <= tuning.max_preloaded_weights
    return is_small and fused_quantize.choose_warps(weight.values.shape[1]) is not None


def _choose_tile(weight: FP8Weight) -> FP8GemvTile | PreloadingGemvTile:
    tuning = tuning_for(weight.values.device).fp8_gemv
    if is_preloading_profitable(weight):
        return tuning.preloading_tile
    return tuning.tile if weight.values.shape[1] <= tuning.short_inputs else tuning.long_tile
