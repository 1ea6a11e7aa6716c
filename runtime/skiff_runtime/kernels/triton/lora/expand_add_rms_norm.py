"""LoRA's B (A x), the addition of a residual, and RMSNorm of the rows, in one launch."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.triton.lora.expand import RANK_BLOCK, expand_row
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK: Final = 4096
"""Outputs whose B a program reads at a time."""
WARPS: Final = 16


@triton.jit
def expand_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    slots: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one row, which is held in registers, BLOCK elements after the other.

    Grid: (rows).

    x, residual         [rows, WIDTH], rows ``x_stride`` and ``residual_stride`` apart
    weight              [WIDTH]
    normed, total       [rows, WIDTH], written: the norm, and the sum in the type of the model
    inner, b, ranks     see ``LoraExpand``, for a layer of one part; rows of inner ``inner_stride`` apart
    slots               int32 [rows]: negative for rows without an adapter
    eps                 float
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_dependencies(PDL)
    dtype = total.dtype.element_ty
    slot = tl.load(slots + row)
    is_adapted = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.where(is_adapted, tl.load(ranks + slot), 0)
    inner_row = inner + row * inner_stride + slot * MAX_RANK
    b_slot = b + slot.to(tl.int64) * (WIDTH * MAX_RANK)
    sums: tl.tuple = ()
    squares = 0.0
    for first in tl.static_range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
        before = tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
        value += expand_row(inner_row, b_slot, rank, columns, inside & is_adapted, MAX_RANK, RANK_BLOCK)
        rounded = (value.to(dtype).to(tl.float32) + before).to(dtype)
        tl.store(total + row * WIDTH + columns, rounded, inside)
        value = rounded.to(tl.float32)
        squares += tl.sum(value * value, 0)
        sums = sums + (value,)  # noqa: RUF005
    scale = tl.rsqrt(squares / WIDTH + eps)
    for number in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
        columns = number * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
        # Rounded before it is multiplied by the weight, as ``rms_norm_kernel`` does.
        scaled = (sums[number] * scale).to(dtype).to(tl.float32)
        tl.store(normed + row * WIDTH + columns, (scaled * weights).to(dtype), inside)


def expand_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, expand: LoraExpand
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``kernels.rms_norm.add_rms_norm`` does with ``expand``, of a layer of one part."""
    (rows, width), lora = x.shape, expand.weights
    assert lora.part_sizes == (width,)
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        expand_add_rms_norm_kernel[(rows,)](
            *(x, residual, weight, normed, total, expand.inner, lora.b, lora.ranks, expand.mapping.slots),
            *(x.stride(0), residual.stride(0), expand.inner.stride(0), eps),
            WIDTH=width,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)),
            MAX_RANK=lora.b.shape[2],
            RANK_BLOCK=RANK_BLOCK,
            num_warps=WARPS,
            **pdl_options(x.device),
        )
    return normed, total
