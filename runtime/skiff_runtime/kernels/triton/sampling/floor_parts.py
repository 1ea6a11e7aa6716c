"""What the search for the least number that is kept begins with, by parts of rows: the largest number, sums, and candidates."""

from typing import Final

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.softmax import LOG2_E
from skiff_runtime.kernels.triton.runtime.dependent_launch import launch_dependents, wait_for_dependencies
from skiff_runtime.kernels.triton.sampling.floor_search import key_of, sums_at_or_above

NEAREST: Final = tl.constexpr(0.75)
"""Temperatures from the largest logit to the first key of the first pass; to each other one it is twice as far."""
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def wishes(
    slots: tl.tensor, filters: tl.tensor, row: tl.tensor, VOCAB: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Temperature, top_k, top_p, whether top_k leaves any out, and whether either does, from a draw."""
    asked = filters + tl.load(slots + row).to(tl.int64) * 4
    temperature, top_k, top_p = tl.load(asked), tl.load(asked + 1), tl.load(asked + 2)
    counts = (top_k > 0) & (top_k < VOCAB)
    return temperature, top_k, top_p, counts, (temperature > 0) & (counts | (top_p < 1))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def chunk_maxima_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    maxima: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The largest logit of each part of the rows that leave any out, those with a min_p among them."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, _, asks = wishes(slots, filters, row, VOCAB)
    min_p = tl.load(filters + tl.load(slots + row).to(tl.int64) * 4 + 3)
    if asks | ((temperature > 0) & (min_p > 0)):
        for part in range(tl.program_id(1), PARTS, tl.num_programs(1)):
            token = part * PART + tl.arange(0, PART)
            logit = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
            tl.store(maxima + row * PARTS + part, tl.max(logit, 0))


@triton.jit
def _first_keys(
    maxima: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The row's largest logit, and the keys [PIVOTS] of the first pass, of which the last is below all numbers.

    Each launch finds them anew and must find the same: distances are exact multiples of one product.
    """
    each = tl.arange(0, PARTS_BLOCK)
    largest = tl.max(tl.load(maxima + row * PARTS + each, each < PARTS, -float("inf")), 0)
    turn = tl.arange(0, PIVOTS)
    below = tl.where(turn == PIVOTS - 1, float("inf"), NEAREST * temperature * tl.exp2(turn.to(tl.float32)))
    return largest, key_of(largest - below, SPARE).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def partial_sums_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of each part, what is not below each key: how it counts towards what is wanted, and how many numbers it is."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, counts, asks = wishes(slots, filters, row, VOCAB)
    if asks:
        largest, keys = _first_keys(maxima, row, temperature, PARTS, PARTS_BLOCK, PIVOTS, SPARE)
        scale = _LOG2_E / temperature
        for part in range(tl.program_id(1), PARTS, tl.num_programs(1)):
            own, size = logits + row * stride + part * PART, tl.minimum(VOCAB - part * PART, PART)
            cell = sums + ((row * PARTS + part) * 2) * PIVOTS + tl.arange(0, PIVOTS)
            tl.store(cell, sums_at_or_above(own, size, keys, largest, scale, counts, PIVOTS, BLOCK, SPARE))
            tl.store(
                cell + PIVOTS, sums_at_or_above(own, size, keys, largest, scale, True, PIVOTS, BLOCK, SPARE)
            )


@triton.jit
def select_pivot(
    maxima: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What the sums of all parts tell of a row.

    How many numbers [PARTS_BLOCK] are not below the last key with enough; that key; the first without; the one behind all;
    the largest logit; what scales logits; and the wanted sum.
    """
    largest, keys = _first_keys(maxima, row, temperature, PARTS, PARTS_BLOCK, PIVOTS, SPARE)
    each = tl.arange(0, PARTS_BLOCK)[:, None]
    cell = sums + ((row * PARTS + each) * 2) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    total = tl.sum(tl.load(cell, each < PARTS, 0.0), 0)
    wanted = tl.where(counts, top_k, top_p * tl.max(total, 0))
    low = tl.max(tl.where(total >= wanted, keys, tl.min(keys, 0)), 0)
    end = key_of(largest, SPARE).to(tl.int64) + 1
    high = tl.min(tl.where(total >= wanted, end, keys), 0)
    amounts = tl.load(cell + PIVOTS, (each < PARTS) & (keys == low)[None, :], 0.0)
    return tl.max(amounts, 1).to(tl.int32), low, high, end, largest, _LOG2_E / temperature, wanted


@triton.jit(do_not_specialize_on_alignment=["slots"])
def gather_candidates_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    near: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Put what is not below the first cut together in ``near`` [rows, ROOM], in its order, if there is room."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, counts, asks = wishes(slots, filters, row, VOCAB)
    if asks:
        amounts, low, _, _, _, _, _ = select_pivot(
            maxima, sums, row, temperature, top_k, top_p, counts, PARTS, PARTS_BLOCK, PIVOTS, SPARE
        )
        if tl.sum(amounts, 0) <= ROOM:
            for part in range(tl.program_id(1), PARTS, tl.num_programs(1)):
                place = near + row * ROOM + tl.sum(tl.where(tl.arange(0, PARTS_BLOCK) < part, amounts, 0), 0)
                own, size = logits + row * stride + part * PART, tl.minimum(VOCAB - part * PART, PART)
                _gather(own, size, low, place, BLOCK, SPARE)


@triton.jit
def _gather(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    place: tl.tensor,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> None:
    """Write the numbers whose keys are from ``low`` on, one behind another."""
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        number = tl.load(numbers + at, at < count, -float("inf")).to(tl.float32)
        taken = ((key_of(number, SPARE) >= low) & (at < count)).to(tl.int32)
        tl.store(place + tl.cumsum(taken, 0) - 1, number, taken > 0)
        place += tl.sum(taken, 0)
