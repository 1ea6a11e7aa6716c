"""What top_k and top_p leave of each row of logits: the least of it, found without sorting.

Numbers are ordered as whole numbers, their keys. One program a row counts, or weighs, all that is not below each of some
keys in one pass, and goes on between the two where the wanted sum is reached, until these are neighbours. The first such
keys lie at fixed distances from the largest number. What is not below the one that is enough is put together, mostly some
hundred numbers, so that the other passes need not see the whole row.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fused.overlap import await_previous, launch_options, let_next_start
from skiff_runtime.kernels.fused.softmax import LOG2_E

PIVOTS: Final = 8
"""Keys that are compared with in one pass."""
BLOCK: Final = 4096
"""Logits of a row that a program looks at together, and those that it can put together."""
NEAREST: Final = tl.constexpr(0.75)
"""Temperatures from the largest logit to the first key of the first pass; to each other one it is twice as far."""
_SPARE_BITS: Final = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Of a float32, the last ones, that say nothing where it was one of these types."""
_LOG2_E = tl.constexpr(LOG2_E)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _find_floors(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    near: tl.tensor,
    floors: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    asked = filters + tl.load(slots + row).to(tl.int64) * 4
    temperature, top_k, top_p = tl.load(asked), tl.load(asked + 1), tl.load(asked + 2)
    counts = (top_k > 0) & (top_k < VOCAB)
    floor = -float("inf")
    if (temperature > 0) & (counts | (top_p < 1)):
        own, place = logits + row * stride, near + row * BLOCK
        floor = _floor(own, place, temperature, top_k, top_p, counts, VOCAB, PIVOTS, BLOCK, SPARE)
        floor = tl.div_rn(floor, temperature)
    tl.store(floors + row, floor)


@triton.jit
def _floor(
    row: tl.tensor,
    near: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    VOCAB: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:
    """The least logit that is kept; ``counts`` says whether top_k leaves any out."""
    largest = _largest(row, VOCAB, BLOCK)
    scale = _LOG2_E / temperature
    end = _key(largest, SPARE).to(tl.int64) + 1
    turn = tl.arange(0, PIVOTS)
    below = tl.where(turn == PIVOTS - 1, float("inf"), NEAREST * temperature * tl.exp2(turn.to(tl.float32)))
    pivots = _key(largest - below, SPARE).to(tl.int64)
    sums = _sums(row, VOCAB, pivots, largest, scale, counts, PIVOTS, BLOCK, SPARE)
    wanted = tl.where(counts, top_k, top_p * tl.max(sums, 0))
    low = tl.max(tl.where(sums >= wanted, pivots, tl.min(pivots, 0)), 0)
    high = tl.min(tl.where(sums >= wanted, end, pivots), 0)
    count = _gather(row, near, low, VOCAB, BLOCK, SPARE)
    if count <= BLOCK:
        low = _least(near, count, low, high, end, largest, scale, wanted, top_p, counts, PIVOTS, BLOCK, SPARE)
    else:
        low = _least(row, VOCAB, low, high, end, largest, scale, wanted, top_p, counts, PIVOTS, BLOCK, SPARE)
    return _value(low, SPARE)


@triton.jit
def _least(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    end: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:
    """The key of the least number that is kept: it is from ``low`` on, and the first sum is ``wanted`` below ``high``."""
    if counts:
        low = _search(numbers, count, low, high, largest, scale, wanted, True, PIVOTS, BLOCK, SPARE)
        above = low + 1 + tl.zeros((PIVOTS,), tl.int64)
        more = tl.max(_sums(numbers, count, above, largest, scale, True, PIVOTS, BLOCK, SPARE), 0)
        weight = tl.max(_sums(numbers, count, above, largest, scale, False, PIVOTS, BLOCK, SPARE), 0)
        weight += (wanted - more) * tl.exp2((_value(low, SPARE) - largest) * scale)
        wanted, high = top_p * weight, end
    if top_p < 1:
        low = _search(numbers, count, low, high, largest, scale, wanted, False, PIVOTS, BLOCK, SPARE)
    return low


@triton.jit
def _search(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    counts: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:
    """The last key from ``low`` to below ``high`` with at least the ``wanted`` sum not below it."""
    turn = tl.arange(0, PIVOTS).to(tl.int64)
    while high - low > 1:
        pivots = low + 1 + (high - low - 1) * turn // PIVOTS
        sums = _sums(numbers, count, pivots, largest, scale, counts, PIVOTS, BLOCK, SPARE)
        low = tl.max(tl.where(sums >= wanted, pivots, low), 0)
        high = tl.min(tl.where(sums >= wanted, high, pivots), 0)
    return low


@triton.jit
def _sums(
    numbers: tl.tensor,
    count: tl.tensor,
    pivots: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    counts: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:
    """Of the numbers not below each of ``pivots`` [PIVOTS], how many there are, or their weights: float32[PIVOTS]."""
    total = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :]
        inside = place < count
        number = tl.load(numbers + place, inside, -float("inf")).to(tl.float32)
        share = tl.full((1, BLOCK), 1.0, tl.float32)
        if not counts:
            share = tl.exp2((number - largest) * scale)
        taken = (_key(number, SPARE) >= pivots[:, None]) & inside
        total += tl.where(taken, share, 0.0)
    return tl.sum(total, 1)


@triton.jit
def _gather(
    row: tl.tensor,
    near: tl.tensor,
    low: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:
    """Put the numbers whose keys are from ``low`` on together, as far as there is room; how many they are."""
    count = tl.zeros((), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        place = first + tl.arange(0, BLOCK)
        number = tl.load(row + place, place < VOCAB, -float("inf")).to(tl.float32)
        taken = ((_key(number, SPARE) >= low) & (place < VOCAB)).to(tl.int32)
        target = count + tl.cumsum(taken, 0) - 1
        tl.store(near + target, number, (taken > 0) & (target < BLOCK))
        count += tl.sum(taken, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _largest(row: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    found = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        place = first + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(row + place, place < VOCAB, -float("inf")).to(tl.float32))
    return tl.max(found, 0)


@triton.jit
def _key(number: tl.tensor, SPARE: tl.constexpr) -> tl.tensor:
    """int32, ordered as float32 numbers are."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE


@triton.jit
def _value(key: tl.tensor, SPARE: tl.constexpr) -> tl.tensor:
    """The number that has this key."""
    bits = (key << SPARE).to(tl.int32)
    bits = (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE << SPARE
    return bits.to(tl.float32, bitcast=True)


def find_floors(logits: torch.Tensor, slots: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """The least scaled logits that top_k, then top_p, keep of logits [S, vocab]: float32[S].

    ``filters`` as ``kernels.sampling.choose`` takes them. Rows that ask for neither have -inf, and cost nothing.
    """
    rows, vocab = logits.shape
    near = torch.empty((rows, BLOCK), dtype=torch.float32, device=logits.device)
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _find_floors[(rows,)](
            *(logits, slots, filters, near, floors, logits.stride(0)),
            VOCAB=vocab,
            PIVOTS=PIVOTS,
            BLOCK=BLOCK,
            SPARE=_SPARE_BITS[logits.dtype],
            num_warps=16,
            **launch_options(logits.device),
        )
    return floors
