"""Grouping of a step's tokens by LoRA slot, once a step, into row blocks of one slot each.

It is the sorting of (token, expert) pairs of mixture of experts with one choice for each token; tokens without a slot
are left out. The same launch counts the epoch of the step, by which ``add_lora`` knows its own partial sums from those
of other launches.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.lora import LoraKernelMemory, RowBlocks
from skiff_runtime.kernels.triton.moe.moe_align_block_size import (
    align_block_size,
    align_options,
    max_row_blocks,
)
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import pdl_options, wait_for_dependencies
from skiff_runtime.kernels.tuning import LoraTile, tuning_for

EPOCHS: Final = 1 << 22
"""Epochs are 1 to EPOCHS - 1; one and a call id below 1,024 fit into the 32 bits of a mark."""
MAX_CHUNK: Final = 4096
"""Tokens of one loop iteration, at most."""
INDICES_MULTIPLE: Final = 4
"""The arrays of row blocks begin at multiples of 16 bytes: see ``cached_launch.ALIGNMENT``."""
_EPOCHS = tl.constexpr(EPOCHS)
_CLEARED = tl.constexpr(4096)


@triton.jit(do_not_specialize=["tokens", "num_words"])
def group_tokens_kernel(
    slots: tl.tensor,
    block_tokens: tl.tensor,
    block_slots: tl.tensor,
    num_blocks: tl.tensor,
    epoch: tl.tensor,
    words: tl.tensor,
    tokens: tl.tensor,
    num_words: tl.tensor,
    LORAS: tl.constexpr,
    LORAS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the row blocks of one slot and write its tokens there; the first program counts the epoch.

    Grid: (LORAS). It does not let the kernel behind start early, because ``add_lora_kernel`` reads what is written here
    without waiting for all kernels ahead.

    slots               int32 [tokens]; tokens with a slot outside of LORAS are left out
    block_tokens, block_slots, num_blocks  written, see ``RowBlocks``
    epoch               int32 [1], counted: 1 to EPOCHS - 1, then 1 again
    words               int64 [num_words], see ``add_lora_kernel``: cleared before an epoch is used again, once in hours
    CHUNK               tokens of one loop iteration
    """
    wait_for_dependencies(PDL)
    if tl.program_id(0) == 0:
        following = tl.load(epoch) + 1
        if following == _EPOCHS:
            for first in range(0, num_words, _CLEARED):
                word = first + tl.arange(0, _CLEARED)
                tl.store(words + word, tl.zeros((_CLEARED,), tl.int64), word < num_words)
            following = 1
        tl.store(epoch, following)
    align_block_size(
        slots,
        slots,
        block_tokens,
        block_slots,
        num_blocks,
        tokens,
        0,
        LORAS,
        LORAS_BLOCK,
        ROWS,
        CHUNK,
        False,
    )


def choose_tile(tokens: int, device: torch.device) -> LoraTile:
    """Return the tile of steps of ``tokens`` tokens."""
    rules = tuning_for(device).lora.rules
    return next(each.tile for each in rules if each.max_tokens is None or tokens <= each.max_tokens)


def step_sizes(max_tokens: int, device: torch.device) -> list[int]:
    """Return the largest number of tokens, up to ``max_tokens``, of each tile."""
    bounds = [rule.max_tokens for rule in tuning_for(device).lora.rules]
    return sorted({min(bound or max_tokens, max_tokens) for bound in bounds})


def count_indices(max_tokens: int, max_loras: int, device: torch.device) -> tuple[int, int]:
    """Return the int32 numbers of ``block_slots`` and of ``block_tokens`` in steps of up to ``max_tokens`` tokens."""
    found = []
    for tokens in step_sizes(max_tokens, device):
        rows = choose_tile(tokens, device).rows
        blocks = max_row_blocks(tokens, max_loras, rows)
        found.append((blocks, blocks * rows))
    slots, rows = (max(each) for each in zip(*found, strict=True))
    return triton.cdiv(slots, INDICES_MULTIPLE) * INDICES_MULTIPLE, rows


def group_tokens(slots: torch.Tensor, memory: LoraKernelMemory, max_loras: int) -> RowBlocks:
    """Group tokens by ``slots`` int32 [T], in ``memory``, and count its epoch."""
    tokens, device = len(slots), slots.device
    rows = choose_tile(tokens, device).rows
    blocks = max_row_blocks(tokens, max_loras, rows)
    block_tokens, block_slots = memory.block_tokens[: blocks * rows], memory.block_slots[:blocks]
    assert len(block_slots) == blocks and len(block_tokens) == blocks * rows
    options = align_options(tokens, MAX_CHUNK)
    launch(
        group_tokens_kernel,
        (max_loras, 1, 1),
        (slots, block_tokens, block_slots, memory.num_blocks, memory.epoch, memory.words),
        (tokens, len(memory.words)),
        LORAS=max_loras,
        LORAS_BLOCK=triton.next_power_of_2(max_loras),
        ROWS=rows,
        CHUNK=options["CHUNK"],
        num_warps=options["num_warps"],
        **pdl_options(device),
    )
    return RowBlocks(block_tokens, block_slots, memory.num_blocks, rows, memory)
