"""Sorting of a step's (token, expert) pairs by expert, padded to whole row blocks (vLLM: ``moe_align_block_size``).

The problem: the rows of a block are multiplied with one expert's weights, so the pairs must be sorted by expert, and
every expert's pairs must fill whole blocks; and the host, which sizes the grids, must not wait for the numbers. The
idea is a counting sort without atomics: a program for each expert reads all ids, counts those of every expert, finds
by a prefix sum where its own blocks begin, and puts its pairs there in their order. All programs count the same, which
costs less than a launch that would count once; with many pairs there is that launch.

Invariant: pairs are ordered by expert, then by index, whatever the order in which programs run. The arrays have room
for the most blocks that can be; a word on the device has the number of those in use, which the programs of the
products read and return.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import tuning_for

MIN_CHUNK: Final = 256
"""The fewest pairs that are counted at a time."""
COUNT_ROWS = tl.constexpr(16)
"""The chunks whose counts are added up at a time."""


class SortedPairs(NamedTuple):
    """The pairs of a step sorted by expert, in blocks of ``rows`` of which ``num_blocks`` are in use.

    ``pair_ids`` int32 [max_blocks * rows]: indices of pairs; the number of pairs in rows that only fill a block.
    ``expert_ids`` int32 [max_blocks]: the block's expert, counted from the first one here.
    ``num_blocks`` int32 [1]. Nothing is written beyond the blocks in use.
    """

    pair_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_blocks: torch.Tensor


@triton.jit
def _count_experts(
    topk_ids: tl.tensor,
    first: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Return int32 [EXPERTS_BLOCK]: the pairs of each expert among CHUNK pairs from ``first`` on."""
    pair = first + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + pair, pair < pairs, -1) - first_expert
    inside = (pair < pairs) & (expert >= 0) & (expert < EXPERTS)
    return tl.histogram(tl.where(inside, expert, 0), EXPERTS_BLOCK, mask=inside)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def count_experts_kernel(
    topk_ids: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Count the pairs of each expert in one chunk.

    Grid: (chunks of CHUNK pairs). The arguments are those of ``moe_align_block_size_kernel``.
    """
    launch_dependents(PDL)
    chunk = tl.program_id(0)
    wait_for_dependencies(PDL)
    found = _count_experts(topk_ids, chunk * CHUNK, pairs, first_expert, EXPERTS, EXPERTS_BLOCK, CHUNK)
    tl.store(counts + chunk * EXPERTS_BLOCK + tl.arange(0, EXPERTS_BLOCK), found)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def moe_align_block_size_kernel(
    topk_ids: tl.tensor,
    counts: tl.tensor,
    pair_ids: tl.tensor,
    expert_ids: tl.tensor,
    num_blocks: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find one expert's blocks and write its pairs there.

    Grid: (EXPERTS).

    topk_ids            int32 [pairs]: the expert of each pair; those outside of EXPERTS from ``first_expert`` on are
                        left out
    counts              int32 [chunks, EXPERTS_BLOCK]: with HAS_COUNTS, the pairs of each expert in each chunk
    pair_ids            int32 [blocks, ROWS], written, see ``SortedPairs``
    expert_ids          int32 [blocks], written
    num_blocks          int32 [1], written by the first program
    CHUNK               pairs of one loop iteration
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    align_block_size(
        topk_ids,
        counts,
        pair_ids,
        expert_ids,
        num_blocks,
        pairs,
        first_expert,
        EXPERTS,
        EXPERTS_BLOCK,
        ROWS,
        CHUNK,
        HAS_COUNTS,
    )


@triton.jit
def align_block_size(
    topk_ids: tl.tensor,
    counts: tl.tensor,
    pair_ids: tl.tensor,
    expert_ids: tl.tensor,
    num_blocks: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
) -> None:
    """Sort the pairs as ``moe_align_block_size_kernel`` does, for kernels with one program for each expert."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_BLOCK)
    total = tl.zeros((EXPERTS_BLOCK,), tl.int32)
    if HAS_COUNTS:
        chunks = (pairs + CHUNK - 1) // CHUNK
        for first in range(0, chunks, COUNT_ROWS):
            chunk = first + tl.arange(0, COUNT_ROWS)[:, None]
            block = tl.load(counts + chunk * EXPERTS_BLOCK + expert[None, :], chunk < chunks, 0)
            total += tl.sum(block, 0)
    else:
        for first in range(0, pairs, CHUNK):
            total += _count_experts(topk_ids, first, pairs, first_expert, EXPERTS, EXPERTS_BLOCK, CHUNK)
    blocks = (total + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(expert < own, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(expert == own, blocks, 0), 0)
    count = tl.sum(tl.where(expert == own, total, 0), 0)
    if own == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    for first in range(0, own_blocks, EXPERTS_BLOCK):
        block_index = first + expert
        tl.store(expert_ids + begin + block_index, own + tl.zeros_like(expert), block_index < own_blocks)
    rows = pair_ids + begin * ROWS
    filler = count + tl.arange(0, ROWS)
    tl.store(rows + filler, pairs + tl.zeros_like(filler), filler < own_blocks * ROWS)
    written = 0
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        is_own = tl.load(topk_ids + pair, pair < pairs, -1) - first_expert == own
        ones = is_own.to(tl.int32)
        tl.store(rows + written + tl.cumsum(ones, 0) - 1, pair, is_own)
        written += tl.sum(ones, 0)


def max_row_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return the most blocks of ``rows`` pairs that can be: each expert's last block may have a single pair."""
    return min(pairs, (pairs + min(experts, pairs) * (rows - 1)) // rows)


def align_options(pairs: int, max_chunk: int) -> dict[str, Any]:
    """Return the constants and options of ``moe_align_block_size_kernel`` that depend on the number of pairs."""
    chunk = min(max(triton.next_power_of_2(pairs), MIN_CHUNK), max_chunk)
    return {"CHUNK": chunk, "HAS_COUNTS": pairs > chunk, "num_warps": 8 if chunk > 1024 else 4}


def moe_align_block_size(
    topk_ids: torch.Tensor, *, first_expert: int, experts: int, rows: int
) -> SortedPairs:
    """Sort the pairs of topk_ids int32 [T, top_k] by expert, for blocks of ``rows`` of them.

    Only experts from ``first_expert`` on, ``experts`` of them, are here; pairs of others are left out.
    """
    pairs, device = topk_ids.numel(), topk_ids.device
    most = max_row_blocks(pairs, experts, rows)
    # All three begin at multiples of 16 bytes, whatever the number of blocks: see ``cached_launch.ALIGNMENT``.
    words = torch.empty(4 + most * (rows + 1), dtype=torch.int32, device=device)
    num_blocks, pair_ids, expert_ids = words[:1], words[4 : 4 + most * rows], words[4 + most * rows :]
    options = align_options(pairs, tuning_for(device).moe.max_chunk)
    sizes = {"EXPERTS": experts, "EXPERTS_BLOCK": triton.next_power_of_2(experts), **pdl_options(device)}
    counts = topk_ids
    if options["HAS_COUNTS"]:
        chunks = triton.cdiv(pairs, options["CHUNK"])
        counts = torch.empty((chunks, sizes["EXPERTS_BLOCK"]), dtype=torch.int32, device=device)
        launch(
            count_experts_kernel,
            (chunks, 1, 1),
            (topk_ids, counts),
            (pairs, first_expert),
            CHUNK=options["CHUNK"],
            num_warps=options["num_warps"],
            **sizes,
        )
    launch(
        moe_align_block_size_kernel,
        (experts, 1, 1),
        (topk_ids, counts, pair_ids, expert_ids, num_blocks),
        (pairs, first_expert),
        ROWS=rows,
        **options,
        **sizes,
    )
    return SortedPairs(pair_ids, expert_ids, num_blocks)
