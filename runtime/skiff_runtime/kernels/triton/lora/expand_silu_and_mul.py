"""LoRA's B (A x) of gate and up, and SwiGLU's product, in one launch.

For 16 slots B of both is a tenth of the base matrix, too large to be read for each of many tokens: then a program has the
tokens of one row block, and tokens without an adapter have programs of their own.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.triton.lora.expand import RANK_BLOCK, expand_row
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import multiply_by_silu
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

COLUMNS: Final = 128
"""Columns of gate, and of up, that a program computes."""
WARPS: Final = 4
MIN_RANK: Final = 16
"""The fewest columns of A x that the tensor cores multiply."""


@triton.jit
def expand_silu_and_mul_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    slots: tl.tensor,
    stride: tl.tensor,
    inner_stride: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute COLUMNS columns of one token.

    Grid: (tokens, the columns divided by COLUMNS).

    gate_up             [tokens, 2 * WIDTH], rows ``stride`` apart: gates, then the factors
    output              [tokens, WIDTH], written
    inner, b, ranks     see ``LoraExpand``, for a layer of two parts; rows of inner ``inner_stride`` apart
    slots               int32 [tokens]: negative for tokens without an adapter
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    dtype = output.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * stride + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + WIDTH + column, inside, 0.0).to(tl.float32)
    slot = tl.load(slots + token)
    is_adapted = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.where(is_adapted, tl.load(ranks + slot), 0)
    gate_inner = inner + token * inner_stride + slot * (2 * MAX_RANK)
    gate_b = b + slot.to(tl.int64) * (2 * WIDTH * MAX_RANK)
    is_read = inside & is_adapted
    gate += expand_row(gate_inner, gate_b, rank, column, is_read, MAX_RANK, RANK_BLOCK)
    up_inner, up_b = gate_inner + MAX_RANK, gate_b + WIDTH * MAX_RANK
    up += expand_row(up_inner, up_b, rank, column, is_read, MAX_RANK, RANK_BLOCK)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(output + token * WIDTH + column, multiply_by_silu(gate, up, dtype), inside)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def expand_silu_and_mul_blocks_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    slots: tl.tensor,
    block_tokens: tl.tensor,
    block_slots: tl.tensor,
    num_blocks: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,
    inner_stride: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute COLUMNS columns of a row block; or of ROWS tokens in a row, of those without an adapter.

    Grid: (blocks + the tokens divided by ROWS, the columns divided by COLUMNS).

    gate_up, output, inner, b, ranks, slots  see ``expand_silu_and_mul_kernel``
    block_tokens, block_slots, num_blocks    int32, see ``RowBlocks``; ROWS tokens are a block, ``blocks`` the most of them
    ROWS                16 or more, for the tensor cores
    RANK                MAX_RANK rounded up to a power of two, 16 at least
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    dtype = output.dtype.element_ty
    block = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    if block < blocks:
        is_used = block < tl.load(num_blocks)
        slot = tl.load(block_slots + block, is_used, 0)
        rank = tl.load(ranks + slot, is_used, 0)
        token = tl.load(block_tokens + block * ROWS + lane, is_used, tokens)
    else:
        slot = tl.full((), 0, tl.int32)
        rank = tl.full((), 0, tl.int32)
        token = (block - blocks) * ROWS + lane
        token = tl.where(tl.load(slots + token, token < tokens, 0) < 0, token, tokens)
    is_token = token < tokens
    if tl.max(is_token.to(tl.int32), 0) > 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        row = token.to(tl.int64)[:, None]
        is_written = is_token[:, None] & inside[None, :]
        source = gate_up + row * stride + column[None, :]
        gate = tl.load(source, is_written, 0.0).to(tl.float32)
        up = tl.load(source + WIDTH, is_written, 0.0).to(tl.float32)
        r = tl.arange(0, RANK)
        is_inner = is_token[:, None] & (r < rank)[None, :]
        inner_rows = inner + row * inner_stride + (slot * (2 * MAX_RANK) + r)[None, :]
        is_read = inside[:, None] & ((rank > 0) & (r < MAX_RANK))[None, :]
        b_rows = b + slot.to(tl.int64) * (2 * WIDTH * MAX_RANK) + column[:, None] * MAX_RANK + r[None, :]
        gate_inner = tl.load(inner_rows, is_inner, 0.0)
        up_inner = tl.load(inner_rows + MAX_RANK, is_inner, 0.0)
        gate_b = tl.load(b_rows, is_read, 0.0)
        up_b = tl.load(b_rows + WIDTH * MAX_RANK, is_read, 0.0)
        gate = tl.dot(gate_inner, tl.trans(gate_b), gate, input_precision=PRECISION)
        up = tl.dot(up_inner, tl.trans(up_b), up, input_precision=PRECISION)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        tl.store(output + row * WIDTH + column[None, :], multiply_by_silu(gate, up, dtype), is_written)


def expand_silu_and_mul(gate_up: torch.Tensor, expand: LoraExpand) -> torch.Tensor:
    """Do what ``kernels.activation.silu_and_mul`` does with ``expand``, of a layer of two equal parts."""
    tokens, width, lora, blocks = len(gate_up), gate_up.shape[1] // 2, expand.weights, expand.mapping.blocks
    assert blocks is not None and lora.part_sizes == (width, width)
    output = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return output
    tensors = (gate_up, output, expand.inner, lora.b, lora.ranks, expand.mapping.slots)
    strides, max_rank = (gate_up.stride(0), expand.inner.stride(0)), lora.b.shape[2]
    tiles = triton.cdiv(width, COLUMNS)
    if blocks.rows == 1:
        expand_silu_and_mul_kernel[(tokens, tiles)](
            *(*tensors, *strides),
            WIDTH=width,
            COLUMNS=COLUMNS,
            MAX_RANK=max_rank,
            RANK_BLOCK=RANK_BLOCK,
            num_warps=WARPS,
            **pdl_options(gate_up.device),
        )
        return output
    most = len(blocks.block_slots)
    expand_silu_and_mul_blocks_kernel[(most + triton.cdiv(tokens, blocks.rows), tiles)](
        *(*tensors, blocks.block_tokens, blocks.block_slots, blocks.num_blocks, tokens, most, *strides),
        WIDTH=width,
        COLUMNS=COLUMNS,
        ROWS=blocks.rows,
        MAX_RANK=max_rank,
        RANK=max(MIN_RANK, triton.next_power_of_2(max_rank)),
        PRECISION="ieee" if gate_up.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        **pdl_options(gate_up.device),
    )
    return output
