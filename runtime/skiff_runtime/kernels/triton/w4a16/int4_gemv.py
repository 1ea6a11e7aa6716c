"""Int4 GEMV: the product of one token with an int4 weight, added up in float32.

A program multiplies two adjacent rows, a run of words at a time. Four bits are so quickly read that what is done with
them counts. An integer is not converted: its bits are put into the highest ones of the mantissa of the float32 number
16, which makes 16 + integer in a shift and a logical instruction. What is added so, and the zero point, is subtracted
for each word and group at once, as its product with the sum of the activations, which both rows share.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import INT4_UNIT, INT4_WORDS
from skiff_runtime.kernels.int4_tensors import Int4Weight
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.w4a16.dequantize import load_zero_points
from skiff_runtime.kernels.tuning import Int4GemvTile, tuning_for

_UNIT = tl.constexpr(INT4_UNIT)
_WORDS = tl.constexpr(INT4_WORDS)
_SIXTEEN = tl.constexpr(0x41800000)
_MANTISSA = tl.constexpr(0x00780000)


@triton.jit
def int4_gemv_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    words_stride: tl.tensor,
    scales_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with two adjacent rows of the weight, RUN words at a time.

    Grid: (pairs of rows). The first words, which no kernel writes, are loaded before the kernel ahead has ended.

    x                   [INPUTS]
    words               int32 [outputs, ROW_WORDS], rows ``words_stride`` apart
    scales, zeros       [outputs, GROUPS], rows ``scales_stride`` apart; zeros are not read without HAS_ZEROS
    bias                [outputs]; not read without HAS_BIAS
    output              [outputs], written, in the type of the model
    GROUP               the inputs of a group, at most 128; 128 where GROUPS is 1
    """
    launch_dependents(PDL)
    row = tl.program_id(0) * 2
    other = tl.minimum(row + 1, outputs - 1)
    source = words + row.to(tl.int64) * words_stride
    other_source = words + other.to(tl.int64) * words_stride
    run = tl.arange(0, RUN)
    first_words = tl.load(source + run, run < ROW_WORDS, 0)
    other_first_words = tl.load(other_source + run, run < ROW_WORDS, 0)
    wait_for_dependencies(PDL)
    acc = tl.zeros((RUN,), tl.float32)
    acc, other_acc = _add_products(
        acc,
        acc,
        first_words,
        other_first_words,
        run,
        x,
        scales,
        zeros,
        row,
        other,
        scales_stride,
        INPUTS,
        ROW_WORDS,
        GROUP,
        GROUPS,
        HAS_ZEROS,
    )
    for first in range(RUN, ROW_WORDS, RUN):
        at = first + run
        packed = tl.load(source + at, at < ROW_WORDS, 0)
        other_packed = tl.load(other_source + at, at < ROW_WORDS, 0)
        acc, other_acc = _add_products(
            acc,
            other_acc,
            packed,
            other_packed,
            at,
            x,
            scales,
            zeros,
            row,
            other,
            scales_stride,
            INPUTS,
            ROW_WORDS,
            GROUP,
            GROUPS,
            HAS_ZEROS,
        )
    _store_output(acc, bias, output, row, outputs, HAS_BIAS)
    _store_output(other_acc, bias, output, row + 1, outputs, HAS_BIAS)


@triton.jit
def _add_products(
    acc: tl.tensor,
    other_acc: tl.tensor,
    packed: tl.tensor,
    other_packed: tl.tensor,
    at: tl.tensor,
    x: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    row: tl.tensor,
    other: tl.tensor,
    scales_stride: tl.tensor,
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the products of the words ``at`` of both rows to their sums."""
    RUNS_OF_GROUP: tl.constexpr = GROUP // _WORDS
    unit = at // _WORDS
    column = unit * _UNIT + at % _WORDS
    for part in tl.static_range(_UNIT // GROUP):
        total = tl.zeros(at.shape, tl.float32)
        product = tl.zeros(at.shape, tl.float32)
        other_product = tl.zeros(at.shape, tl.float32)
        for each in tl.static_range(RUNS_OF_GROUP):
            first = column + (part * RUNS_OF_GROUP + each) * _WORDS
            value = tl.load(x + first, (at < ROW_WORDS) & (first < INPUTS), 0.0).to(tl.float32)
            total += value
            product += _add_sixteen(packed, part * RUNS_OF_GROUP + each) * value
            other_product += _add_sixteen(other_packed, part * RUNS_OF_GROUP + each) * value
        group = unit * (_UNIT // GROUP) + part if GROUPS > 1 else unit * 0
        known = (at < ROW_WORDS) & (group < GROUPS)
        place, other_place = row * scales_stride + group, other * scales_stride + group
        zero = load_zero_points(zeros, place, known, HAS_ZEROS) + 16.0
        other_zero = load_zero_points(zeros, other_place, known, HAS_ZEROS) + 16.0
        scale = tl.load(scales + place, known, 0.0).to(tl.float32)
        other_scale = tl.load(scales + other_place, known, 0.0).to(tl.float32)
        acc += scale * (product - zero * total)
        other_acc += other_scale * (other_product - other_zero * total)
    return acc, other_acc


@triton.jit
def _add_sixteen(packed: tl.tensor, NIBBLE: tl.constexpr) -> tl.tensor:
    """Return 16 + the four bits NIBBLE of each word, float32."""
    shifted = packed << (19 - 4 * NIBBLE) if NIBBLE < 5 else packed >> (4 * NIBBLE - 19)
    return ((shifted & _MANTISSA) | _SIXTEEN).to(tl.float32, bitcast=True)


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


def is_profitable(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Return whether ``int4_gemv`` supports this product and is faster at it than the others."""
    return x.shape[0] == 1


def int4_gemv(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: Int4GemvTile | None = None,
) -> torch.Tensor:
    """Return x [1, inputs] times weight [outputs, inputs] plus bias [outputs]: [1, outputs].

    ``tile`` replaces the tuned one.
    """
    (outputs, row_words), device = weight.words.shape, x.device
    tile = tile or tuning_for(device).w4a16.gemv_tile
    output = torch.empty((1, outputs), dtype=x.dtype, device=device)
    int4_gemv_kernel[(triton.cdiv(outputs, 2),)](
        *(x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros),
        *(weight.scales if bias is None else bias, output),
        *(weight.words.stride(0), weight.scales.stride(0), outputs),
        INPUTS=weight.inputs,
        ROW_WORDS=row_words,
        GROUP=weight.group_size or INT4_UNIT,
        GROUPS=weight.scales.shape[1],
        RUN=min(tile.words, triton.next_power_of_2(row_words)),
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        **pdl_options(device),
    )
    return output
