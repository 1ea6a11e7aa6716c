"""The product of one token with a matrix, as fast as the matrix can be read.

A program multiplies one or two rows of the matrix in long runs of columns, and sums in float32: many programs read at
a time, and every byte of the matrix is read once. Weights in e4m3 are widened as they come, and scaled at the end.
For two tokens and more, the GPU's library is within a few percent of the rate of copies.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

MAX_OUTPUTS: Final = 65536
"""Beyond (output heads), the library reads as fast as we do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time."""

    rows: int
    columns: int
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    source = weight + row.to(tl.int64)[:, None] * weight_stride
    for first in range(0, INPUTS, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < INPUTS
        part = tl.load(source + column[None, :], real[:, None] & inside[None, :], 0.0).to(tl.float32)
        given = tl.load(x + column, inside, 0.0).to(tl.float32)
        total += given[None, :] * part
    product = tl.sum(total, 1)
    if SCALED:
        product *= tl.load(scales + row, real, 0.0) * tl.load(x_scale)
    if BIASED:
        product += tl.load(bias + row, real, 0.0).to(tl.float32)
    tl.store(output + row, product.to(output.dtype.element_ty), real)


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` was faster than the library's product on an H200."""
    return x.shape[0] == 1 and weight.shape[0] <= MAX_OUTPUTS


def tile_of(inputs: int) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    if inputs <= 2048 or inputs > 16384:
        return Tile(rows=2, columns=1024)
    return Tile(rows=1, columns=2048 if inputs % 2048 == 0 else 1024)


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
    tile = tile or tile_of(inputs)
    _one_token[(triton.cdiv(outputs, tile.rows),)](
        x,
        weight,
        *(scales or (x, weight)),
        weight if bias is None else bias,
        output,
        weight.stride(0),
        outputs,
        INPUTS=inputs,
        ROWS=tile.rows,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        SCALED=scales is not None,
        BIASED=bias is not None,
        num_warps=tile.warps,
    )
    return output
