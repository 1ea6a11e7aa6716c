"""Block FP8 GEMV: the product of one token with a weight that has a scale for each block of 128 x 128.

As ``fp8_gemv``, with one difference: eight products are added up, as there, and their sum is multiplied by the scales of
their block and of their group of activations before it is added to the others. So a scale costs one multiplication for
eight weights; the two scales of 16 lanes are the same addresses.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8_tensors import BlockFP8Weight, QuantizedActivations
from skiff_runtime.kernels.triton.fp8.dequantize import dot_fp8x8, supports_fp8_ptx
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import FP8GemvTile, tuning_for

EIGHT: Final = tl.constexpr(8)
"""FP8 numbers in an int64, in which they are loaded."""
_EIGHTS_PER_BLOCK = tl.constexpr(FP8_BLOCK // 8)
_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def block_fp8_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    scales_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with two adjacent rows of the weight, COLUMNS columns at a time.

    Grid: (pairs of rows). The rows of a pair are of the same block, because the first is even. The first columns of the
    weight, which no kernel writes, are loaded before the kernel ahead has ended.

    x                   float16 [INPUTS]: FP8 values divided by ``FP16_DOWNSCALE``
    weight              FP8 [outputs, INPUTS], rows ``weight_stride`` apart; INPUTS is a multiple of 8
    x_scales            float32 [groups of 128 inputs]
    scales              float32 [blocks of 128 outputs, groups of inputs], rows ``scales_stride`` apart
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
    scales += row // _BLOCK * scales_stride
    run = tl.arange(0, RUN)
    inside = run < EIGHTS
    first_weights = tl.load(source + run, inside, 0)
    other_first_weights = tl.load(other_source + run, inside, 0)
    weight_scale = tl.load(scales + run // _EIGHTS_PER_BLOCK, inside, 0.0)
    wait_for_dependencies(PDL)
    x_low, x_high = tl.load(x + 2 * run, inside, 0), tl.load(x + 2 * run + 1, inside, 0)
    scale = weight_scale * tl.load(x_scales + run // _EIGHTS_PER_BLOCK, inside, 0.0)
    acc = dot_fp8x8(first_weights, x_low, x_high, USE_PTX) * scale
    other_acc = dot_fp8x8(other_first_weights, x_low, x_high, USE_PTX) * scale
    for first in range(RUN, EIGHTS, RUN):
        at = first + run
        inside = at < EIGHTS
        x_low, x_high = tl.load(x + 2 * at, inside, 0), tl.load(x + 2 * at + 1, inside, 0)
        scale = tl.load(scales + at // _EIGHTS_PER_BLOCK, inside, 0.0)
        scale *= tl.load(x_scales + at // _EIGHTS_PER_BLOCK, inside, 0.0)
        acc += dot_fp8x8(tl.load(source + at, inside, 0), x_low, x_high, USE_PTX) * scale
        other_acc += dot_fp8x8(tl.load(other_source + at, inside, 0), x_low, x_high, USE_PTX) * scale
    _store_output(acc, bias, output, row, outputs, HAS_BIAS)
    _store_output(other_acc, bias, output, row + 1, outputs, HAS_BIAS)


@triton.jit
def _store_output(
    acc: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Add up one row's sums, add the bias and store the output, if there is such a row."""
    inside = row < outputs
    product = tl.sum(acc, 0)
    if HAS_BIAS:
        product += tl.load(bias + row, inside, 0.0).to(tl.float32)
    tl.store(output + row, product.to(output.dtype.element_ty), inside)


def block_fp8_gemv(
    x: QuantizedActivations,
    weight: BlockFP8Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: FP8GemvTile | None = None,
) -> torch.Tensor:
    """Return x [1, inputs] times weight [outputs, inputs] plus bias [outputs]: [1, outputs].

    The values of ``x`` are those of a single token: float16, see ``QuantizedActivations``. ``tile`` replaces the
    tuned one.
    """
    outputs, inputs = weight.values.shape
    tile = tile or _choose_tile(inputs, x.values.device)
    output = torch.empty((1, outputs), dtype=x.dtype, device=x.values.device)
    block_fp8_gemv_kernel[(triton.cdiv(outputs, 2),)](
        *(x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, weight.values.stride(0), weight.scales.stride(0), outputs),
        INPUTS=inputs,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        USE_PTX=supports_fp8_ptx(x.values.device),
        num_warps=tile.warps,
        **pdl_options(x.values.device),
    )
    return output


def _choose_tile(inputs: int, device: torch.device) -> FP8GemvTile:
    tuning = tuning_for(device).block_fp8
    return tuning.gemv_tile if inputs <= tuning.short_inputs else tuning.long_gemv_tile
