"""The product of one token with a matrix, as fast as the matrix can be read.

A program multiplies one or two rows of the matrix in runs of columns, and sums in float32: many programs read at
a time, and every byte of the matrix is read once, the first ones before the activations are there. Rows are not made
one block of two dimensions, for which Triton would pass the activations through shared memory. Weights in e4m3 are
widened as they come, and scaled at the end. For two tokens and more, the GPU's library is within a few percent of the
rate of copies.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import E4M3
from skiff_runtime.kernels.fused.overlap import await_previous, launch_options, let_next_start

MAX_OUTPUTS: Final = 65536
"""Beyond (output heads), the library reads as fast as we do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time: one row, or a pair of them."""

    columns: int
    pair: bool = False
    warps: int = 4


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
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    row = tl.program_id(0) * 2 if PAIR else tl.program_id(0)
    other = tl.minimum(row + 1, outputs - 1)
    run = tl.arange(0, COLUMNS)
    inside = run < INPUTS
    source = weight + row.to(tl.int64) * weight_stride
    beside = weight + other.to(tl.int64) * weight_stride
    ahead = tl.load(source + run, inside, 0.0).to(tl.float32)
    factor, added = _constants(scales, bias, row, SCALED, BIASED)
    if PAIR:
        ahead_beside = tl.load(beside + run, inside, 0.0).to(tl.float32)
        factor_beside, added_beside = _constants(scales, bias, other, SCALED, BIASED)
    await_previous(EARLY)
    given = tl.load(x + run, inside, 0.0).to(tl.float32)
    given_scale = tl.load(x_scale) if SCALED else 1.0
    total = given * ahead
    if PAIR:
        total_beside = given * ahead_beside
    for first in range(COLUMNS, INPUTS, COLUMNS):
        column = first + run
        inside = column < INPUTS
        given = tl.load(x + column, inside, 0.0).to(tl.float32)
        total += given * tl.load(source + column, inside, 0.0).to(tl.float32)
        if PAIR:
            total_beside += given * tl.load(beside + column, inside, 0.0).to(tl.float32)
    kind = output.dtype.element_ty
    tl.store(output + row, (tl.sum(total, 0) * (factor * given_scale) + added).to(kind))
    if PAIR:
        product = tl.sum(total_beside, 0) * (factor_beside * given_scale) + added_beside
        tl.store(output + row + 1, product.to(kind), row + 1 < outputs)


@triton.jit
def _constants(
    scales: tl.tensor, bias: tl.tensor, row: tl.tensor, SCALED: tl.constexpr, BIASED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What a row's sum is multiplied by, and what is added."""
    factor = 1.0
    added = 0.0
    if SCALED:
        factor = tl.load(scales + row)
    if BIASED:
        added = tl.load(bias + row).to(tl.float32)
    return factor, added


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` was faster than the library's product on an H200."""
    return x.shape[0] == 1 and weight.shape[0] <= MAX_OUTPUTS


def tile_of(weight: torch.Tensor) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    if weight.dtype == E4M3:
        return Tile(columns=512, pair=True, warps=1)
    inputs = weight.shape[1]
    if inputs <= 2048 or inputs > 16384:
        return Tile(columns=1024, pair=True)
    return Tile(columns=2048 if inputs % 2048 == 0 else 1024)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [1, inputs] times weight [outputs, inputs]; [1, outputs] in ``dtype``, or as x.

    ``scales`` float32 [1, 1] and [outputs, 1] belong to x and weight, where they were rounded.
    """
    inputs, outputs = x.shape[1], weight.shape[0]
    output = torch.empty((1, outputs), dtype=dtype or x.dtype, device=x.device)
    tile = tile or tile_of(weight)
    _one_token[(triton.cdiv(outputs, 2 if tile.pair else 1),)](
        x,
        weight,
        *(scales or (x, weight)),
        weight if bias is None else bias,
        output,
        weight.stride(0),
        outputs,
        INPUTS=inputs,
        PAIR=tile.pair,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        SCALED=scales is not None,
        BIASED=bias is not None,
        num_warps=tile.warps,
        **launch_options(x.device),
    )
    return output
