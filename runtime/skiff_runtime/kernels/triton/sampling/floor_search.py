"""The search for the least number that top_k and top_p keep, by one program.

Numbers are ordered as whole numbers, their keys. All that is not below each of some keys is counted, or weighed, in one pass,
and the search goes on between the two where the wanted sum is reached, until these are neighbours.
"""

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def search_threshold(
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
        more = tl.max(sums_at_or_above(numbers, count, above, largest, scale, True, PIVOTS, BLOCK, SPARE), 0)
        weight = tl.max(
            sums_at_or_above(numbers, count, above, largest, scale, False, PIVOTS, BLOCK, SPARE), 0
        )
        weight += (wanted - more) * tl.exp2((value_of(low, SPARE) - largest) * scale)
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
        sums = sums_at_or_above(numbers, count, pivots, largest, scale, counts, PIVOTS, BLOCK, SPARE)
        low = tl.max(tl.where(sums >= wanted, pivots, low), 0)
        high = tl.min(tl.where(sums >= wanted, high, pivots), 0)
    return low


@triton.jit
def sums_at_or_above(
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
        taken = (key_of(number, SPARE) >= pivots[:, None]) & inside
        total += tl.where(taken, share, 0.0)
    return tl.sum(total, 1)


@triton.jit
def key_of(number: tl.tensor, SPARE: tl.constexpr) -> tl.tensor:
    """int32, ordered as float32 numbers are."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE


@triton.jit
def value_of(key: tl.tensor, SPARE: tl.constexpr) -> tl.tensor:
    """The number that has this key."""
    bits = (key << SPARE).to(tl.int32)
    bits = (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE << SPARE
    return bits.to(tl.float32, bitcast=True)
