"""Products of a few tokens with a matrix, as fast as the matrix can be read.

One program multiplies a few rows of the matrix with every token, each row in pieces of ``BLOCK`` columns, so that
each byte of the matrix is read once, in long runs, by many programs at a time. Sums are in float32. Weights in e4m3
are widened as they come, so that activations need not be rounded.
"""

from typing import Final

import torch
import triton
import triton.language as tl

MAX_TOKENS: Final = 8
BLOCK: Final = 1024
WIDE_OUTPUTS: Final = 8192
"""From so many rows of the matrix on, a program takes two: there are enough programs, and x is read less often."""
MAX_OUTPUTS: Final = 65536
"""Beyond (output heads), the library reads as fast as we do."""


@triton.jit
def _gemv(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    column = tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, ROWS, BLOCK), tl.float32)
    source = weight + row.to(tl.int64)[:, None] * weight_stride
    for first in range(0, INPUTS, BLOCK):
        at = first + column
        inside = at < INPUTS
        part = tl.load(source + at[None, :], real[:, None] & inside[None, :], 0.0).to(tl.float32)
        given = tl.load(x + token[:, None] * x_stride + at[None, :], inside[None, :], 0.0).to(tl.float32)
        total += given[:, None, :] * part[None, :, :]
    product = tl.sum(total, 2)
    if SCALED:
        product *= tl.load(scales + row, real, 0.0)[None, :]
    if BIASED:
        product += tl.load(bias + row, real, 0.0).to(tl.float32)[None, :]
    place = output + token[:, None] * outputs + row[None, :]
    tl.store(place, product.to(output.dtype.element_ty), real[None, :])


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``gemv`` can be expected to be faster than the library's product."""
    tokens = x.shape[0]
    return 0 < tokens <= MAX_TOKENS and tokens & (tokens - 1) == 0 and weight.shape[0] <= MAX_OUTPUTS


def gemv(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [1, 2, 4 or 8, inputs] times weight [outputs, inputs], with ``scales`` float32 [outputs, 1] if it is in e4m3."""
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    rows = 2 if outputs >= WIDE_OUTPUTS else 1
    _gemv[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        weight if scales is None else scales,
        weight if bias is None else bias,
        output,
        x.stride(0),
        weight.stride(0),
        outputs,
        INPUTS=inputs,
        TOKENS=tokens,
        ROWS=rows,
        BLOCK=min(BLOCK, triton.next_power_of_2(inputs)),
        SCALED=scales is not None,
        BIASED=bias is not None,
        num_warps=4,
    )
    return output
