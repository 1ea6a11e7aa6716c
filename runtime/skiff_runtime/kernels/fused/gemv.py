"""Products of a few tokens with a matrix, as fast as the matrix can be read.

For one token, a program multiplies a few rows of the matrix in long runs of columns, summing in float32. For more, a
program holds a tile of rows, whose products with all tokens the tensor cores make, so that neither the matrix nor the
tokens are read more often than need be. Weights in e4m3 are widened as they come: activations are not rounded.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

MAX_TOKENS: Final = 8
TOKEN_BLOCK: Final = 16
"""The fewest that the tensor cores take."""
MAX_OUTPUTS: Final = 65536
"""Beyond (output heads), the library reads as fast as we do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time, and how."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


@triton.jit
def _one_token(
    x: tl.tensor,
    weight: tl.tensor,
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
        product *= tl.load(scales + row, real, 0.0)
    if BIASED:
        product += tl.load(bias + row, real, 0.0).to(tl.float32)
    tl.store(output + row, product.to(output.dtype.element_ty), real)


@triton.jit
def _few_tokens(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    tokens: tl.tensor,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    token = tl.arange(0, TOKENS)
    asked = token < tokens
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    source = weight + row.to(tl.int64)[:, None] * weight_stride
    given_at = x + token[None, :] * x_stride
    for first in range(0, INPUTS, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < INPUTS
        part = tl.load(source + column[None, :], real[:, None] & inside[None, :], 0.0)
        given = tl.load(given_at + column[:, None], inside[:, None] & asked[None, :], 0.0)
        total = tl.dot(part.to(given.dtype), given, total, input_precision=PRECISION)
    if SCALED:
        total *= tl.load(scales + row, real, 0.0)[:, None]
    if BIASED:
        total += tl.load(bias + row, real, 0.0).to(tl.float32)[:, None]
    place = output + token[None, :] * outputs + row[:, None]
    tl.store(place, total.to(output.dtype.element_ty), real[:, None] & asked[None, :])


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` can be expected to be faster than the library's product."""
    return 0 < x.shape[0] <= MAX_TOKENS and weight.shape[0] <= MAX_OUTPUTS


def tile_of(tokens: int, outputs: int) -> Tile:
    """The tile that was fastest on an H200."""
    if tokens == 1:
        return Tile(rows=2 if outputs >= 8192 else 1, columns=1024, warps=4)
    return Tile(rows=32, columns=256, warps=4, stages=4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [at most 16, inputs] times weight [outputs, inputs], with ``scales`` float32 [outputs, 1] if it is in e4m3."""
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    tile = tile or tile_of(tokens, outputs)
    grid = (triton.cdiv(outputs, tile.rows),)
    given = (x, weight, weight if scales is None else scales, weight if bias is None else bias, output)
    constants = {
        "INPUTS": inputs,
        "ROWS": tile.rows,
        "COLUMNS": min(tile.columns, max(16, triton.next_power_of_2(inputs))),
        "SCALED": scales is not None,
        "BIASED": bias is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if tokens == 1:
        _one_token[grid](*given, weight.stride(0), outputs, **constants)
    else:
        strides = (x.stride(0), weight.stride(0))
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _few_tokens[grid](
            *given, *strides, outputs, tokens, TOKENS=TOKEN_BLOCK, PRECISION=precision, **constants
        )
    return output
