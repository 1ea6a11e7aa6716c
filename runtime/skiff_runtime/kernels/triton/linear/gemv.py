"""The product of one token with a matrix, as fast as the matrix can be read.

A program multiplies one or two rows of the matrix in runs of columns, and sums in float32: many programs read at
a time, and every byte of the matrix is read once, the first ones before the activations are there. Rows are not made
one block of two dimensions, for which Triton would pass the activations through shared memory. For two tokens and more,
the GPU's library is within a few percent of the rate of copies.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

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
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0) * 2 if PAIR else tl.program_id(0)
    other = tl.minimum(row + 1, outputs - 1)
    run = tl.arange(0, COLUMNS)
    inside = run < INPUTS
    source = weight + row.to(tl.int64) * weight_stride
    beside = weight + other.to(tl.int64) * weight_stride
    ahead = tl.load(source + run, inside, 0.0).to(tl.float32)
    added = tl.load(bias + row).to(tl.float32) if BIASED else 0.0
    if PAIR:
        ahead_beside = tl.load(beside + run, inside, 0.0).to(tl.float32)
        added_beside = tl.load(bias + other).to(tl.float32) if BIASED else 0.0
    wait_for_dependencies(PDL)
    given = tl.load(x + run, inside, 0.0).to(tl.float32)
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
    tl.store(output + row, (tl.sum(total, 0) + added).to(kind))
    if PAIR:
        tl.store(output + row + 1, (tl.sum(total_beside, 0) + added_beside).to(kind), row + 1 < outputs)


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` was faster than the library's product on an H200."""
    return x.shape[0] == 1 and weight.shape[0] <= MAX_OUTPUTS


def tile_of(weight: torch.Tensor) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    inputs = weight.shape[1]
    if inputs <= 2048 or inputs > 16384:
        return Tile(columns=1024, pair=True)
    return Tile(columns=2048 if inputs % 2048 == 0 else 1024)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [1, inputs] times weight [outputs, inputs], plus bias [outputs]; [1, outputs]."""
    inputs, outputs = x.shape[1], weight.shape[0]
    output = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tile = tile or tile_of(weight)
    _one_token[(triton.cdiv(outputs, 2 if tile.pair else 1),)](
        x,
        weight,
        weight if bias is None else bias,
        output,
        weight.stride(0),
        outputs,
        INPUTS=inputs,
        PAIR=tile.pair,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        BIASED=bias is not None,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return output
