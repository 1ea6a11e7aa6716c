"""Products of a few tokens with a matrix, as fast as the matrix can be read.

For one token, a program multiplies a few rows of the matrix in long runs of columns, summing in float32. For more, a
program holds a tile of rows, whose products with all tokens the tensor cores make, so that neither the matrix nor the
tokens are read more often than need be. What is in e4m3 is widened as it comes, and scaled at the end.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

MAX_TOKENS: Final = 8
TOKEN_BLOCK: Final = 16
"""The fewest that the tensor cores take."""
SHORT_INPUTS: Final = 2048
"""Rows of a matrix up to which the library is far from the copy rate for two tokens and more."""
MAX_OUTPUTS: Final = 65536
"""Beyond (output heads), the library reads as fast as we do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time; with more than one of ``stages``, on tensor cores."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    unroll: int = 1


@triton.jit
def _by_rows(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
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
    UNROLL: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    token = tl.arange(0, TOKENS)
    asked = token < tokens
    total = tl.zeros((TOKENS, ROWS, COLUMNS), tl.float32)
    source = weight + row.to(tl.int64)[:, None] * weight_stride
    for first in tl.range(0, INPUTS, COLUMNS, loop_unroll_factor=UNROLL):
        column = first + tl.arange(0, COLUMNS)
        inside = column < INPUTS
        part = tl.load(source + column[None, :], real[:, None] & inside[None, :], 0.0).to(tl.float32)
        given_at = x + token[:, None] * x_stride + column[None, :]
        given = tl.load(given_at, asked[:, None] & inside[None, :], 0.0).to(tl.float32)
        total += given[:, None, :] * part[None, :, :]
    product = tl.sum(total, 2)
    if SCALED:
        product *= tl.load(scales + row, real, 0.0)[None, :]
        product *= tl.load(x_scales + token, asked, 0.0)[:, None]
    if BIASED:
        product += tl.load(bias + row, real, 0.0).to(tl.float32)[None, :]
    place = output + token[:, None] * outputs + row[None, :]
    tl.store(place, product.to(output.dtype.element_ty), asked[:, None] & real[None, :])


@triton.jit
def _by_tiles(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
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
        total = tl.dot(part, given, total, input_precision=PRECISION)
    if SCALED:
        total *= tl.load(scales + row, real, 0.0)[:, None]
        total *= tl.load(x_scales + token, asked, 0.0)[None, :]
    if BIASED:
        total += tl.load(bias + row, real, 0.0).to(tl.float32)[:, None]
    place = output + token[None, :] * outputs + row[:, None]
    tl.store(place, total.to(output.dtype.element_ty), real[:, None] & asked[None, :])


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` was faster than the library's product on an H200."""
    tokens, inputs = x.shape
    few = tokens == 1 or (tokens <= MAX_TOKENS and inputs <= SHORT_INPUTS and weight.element_size() > 1)
    return tokens > 0 and few and weight.shape[0] <= MAX_OUTPUTS


def tile_of(tokens: int, outputs: int, inputs: int) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    if tokens == 1:
        return Tile(rows=2 if inputs <= 2048 or inputs > 16384 else 1, columns=1024, warps=4)
    if inputs > 1024:
        return Tile(rows=16, columns=512, warps=4, stages=3)
    if outputs >= 6144:
        return Tile(rows=64, columns=128, warps=4, stages=4)
    return Tile(rows=32, columns=128, warps=4, stages=5)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [at most 16, inputs] times weight [outputs, inputs]; [T, outputs] in ``dtype``, or as x.

    ``scales`` float32 [T, 1] and [outputs, 1] belong to x and weight in e4m3.
    """
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    output = torch.empty((tokens, outputs), dtype=dtype or x.dtype, device=x.device)
    tile = tile or tile_of(tokens, outputs, inputs)
    sizes = (x.stride(0), weight.stride(0), outputs, tokens)
    constants = {
        "INPUTS": inputs,
        "ROWS": tile.rows,
        "COLUMNS": min(tile.columns, max(32, triton.next_power_of_2(inputs))),
        "SCALED": scales is not None,
        "BIASED": bias is not None,
        "num_warps": tile.warps,
    }
    given = (x, weight, *(scales or (x, weight)), weight if bias is None else bias, output)
    grid = (triton.cdiv(outputs, tile.rows),)
    if tile.stages == 1:
        block = triton.next_power_of_2(tokens)
        _by_rows[grid](*given, *sizes, TOKENS=block, UNROLL=tile.unroll, **constants)
    else:
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        constants["num_stages"] = tile.stages
        _by_tiles[grid](*given, *sizes, TOKENS=TOKEN_BLOCK, PRECISION=precision, **constants)
    return output
