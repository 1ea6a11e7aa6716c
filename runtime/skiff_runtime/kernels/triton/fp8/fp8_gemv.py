"""The product of one token with a matrix in e4m3, as ``gemv`` is for matrices in the model's type.

What is to be done with a number must take less time than to read it, so eight at a time are widened to float16,
multiplied with activations in float16, and added up there, two by two; such sums are added in float32.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import Matrix, QuantizedActivations
from skiff_runtime.kernels.triton.fp8.dequantize import dot_fp8x8, supports_fp8_ptx
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

EIGHT: Final = tl.constexpr(8)
LONG: Final = 8192


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of a pair of rows one program works on at a time."""

    columns: int
    warps: int = 1


@triton.jit
def _one_token(
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
    BIASED: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // EIGHT
    RUN: tl.constexpr = COLUMNS // EIGHT
    row = tl.program_id(0) * 2
    other = tl.minimum(row + 1, outputs - 1)
    given = x.to(tl.pointer_type(tl.int64))
    source = (weight + row.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    beside = (weight + other.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
    run = tl.arange(0, RUN)
    inside = run < EIGHTS
    ahead = tl.load(source + run, inside, 0)
    ahead_beside = tl.load(beside + run, inside, 0)
    wait_for_dependencies(PDL)
    some, more = tl.load(given + 2 * run, inside, 0), tl.load(given + 2 * run + 1, inside, 0)
    total = dot_fp8x8(ahead, some, more, USE_PTX)
    total_beside = dot_fp8x8(ahead_beside, some, more, USE_PTX)
    for first in range(RUN, EIGHTS, RUN):
        place = first + run
        inside = place < EIGHTS
        some, more = tl.load(given + 2 * place, inside, 0), tl.load(given + 2 * place + 1, inside, 0)
        total += dot_fp8x8(tl.load(source + place, inside, 0), some, more, USE_PTX)
        total_beside += dot_fp8x8(tl.load(beside + place, inside, 0), some, more, USE_PTX)
    scale = tl.load(x_scale)
    _finish(total, scale, scales, bias, output, row, outputs, BIASED)
    _finish(total_beside, scale, scales, bias, output, row + 1, outputs, BIASED)


@triton.jit
def _finish(
    total: tl.tensor,
    scale: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    outputs: tl.tensor,
    BIASED: tl.constexpr,
) -> None:
    inside = row < outputs
    product = tl.sum(total, 0) * (scale * tl.load(scales + row, inside, 0.0))
    if BIASED:
        product += tl.load(bias + row, inside, 0.0).to(tl.float32)
    tl.store(output + row, product.to(output.dtype.element_ty), inside)


def tile_of(inputs: int) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    return Tile(2048, warps=2) if inputs > LONG else Tile(1024)


def short_gemv(
    x: QuantizedActivations, weight: Matrix, bias: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """x [1, inputs] in float16 (``QuantizedActivations`` says how) times weight [outputs, inputs], plus bias [outputs]; [1, outputs]."""
    outputs, inputs = weight.values.shape
    tile = tile or tile_of(inputs)
    output = torch.empty((1, outputs), dtype=x.dtype, device=x.values.device)
    _one_token[(triton.cdiv(outputs, 2),)](
        *(x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, weight.values.stride(0), outputs),
        INPUTS=inputs,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        BIASED=bias is not None,
        USE_PTX=supports_fp8_ptx(x.values.device),
        num_warps=tile.warps,
        **pdl_options(x.values.device),
    )
    return output
