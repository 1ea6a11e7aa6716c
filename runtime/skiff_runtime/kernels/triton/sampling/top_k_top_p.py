"""Thresholds that top-k and top-p set on rows of logits, found without sorting.

The problem: top-k and top-p keep the largest logits of a row, down to a threshold, and to sort 150,000 logits for it
takes longer than all other steps of sampling. The idea: float32 numbers are ordered as integers, their keys, and both
the number and the softmax weight of the logits at or above a key fall as the key rises. So the threshold is found by
a search over keys. One pass over the logits takes these sums for PIVOTS keys at once, and the search goes on between
the two neighbours where the target is reached, until these are one apart.

The first pass is made by many programs of each row, with keys at fixed distances from the largest logit; the logits
at or above the key that it selects, mostly some hundred, are gathered, and one program of the row searches among
these. Four launches:

    chunk_maxima_kernel        the largest logit of each chunk of a row
    partial_sums_kernel        of each chunk, counts and weights at or above the first PIVOTS keys
    gather_candidates_kernel   selects the pivot and puts the logits at or above it together
    find_thresholds_kernel     searches among them, or through the whole row where they are too many

Invariant: sums are taken in a fixed order, so the result of a row depends on the row alone. Rows that request neither
top_k nor top_p are skipped by all four. The reference sorts (``kernels.top_k_top_p``). FlashInfer's sampling also
searches by pivots, but draws by rejection; docs/decisions/0011-top-k-and-top-p-without-sorting.md compares.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import tuning_for

PIVOTS: Final = 8
"""Keys whose sums one pass takes."""
NEAREST_PIVOT: Final = tl.constexpr(0.75)
"""The distance of the first pass's first key from the largest logit, in temperatures; each next one is twice as far."""
_SPARE_BITS: Final = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""The low bits of a float32 that are zero where it was of this type; keys leave them out, which shortens the search."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def find_thresholds(
    logits: torch.Tensor, slots: torch.Tensor, sampling_params: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (thresholds float32 [S], maxima float32 [S, chunks]) of logits [S, vocab], of any floating type.

    A threshold is the least scaled logit (logit / temperature) that top_k, then top_p, keep; -inf for rows that
    request neither. ``maxima`` are the largest logits of the row's chunks, written for rows that request one of these
    or min_p. ``slots`` int [S] and ``sampling_params`` float32 [slots, 4] as ``kernels.sampling.sample_tokens`` takes
    them.
    """
    (rows, vocab), device = logits.shape, logits.device
    tuning = tuning_for(device).top_k_top_p
    chunks = triton.cdiv(vocab, tuning.chunk)
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    sums = torch.empty((rows, chunks, 2, PIVOTS), dtype=torch.float32, device=device)
    candidates = torch.empty((rows, tuning.max_candidates), dtype=torch.float32, device=device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return thresholds, maxima
    known, pdl = (logits, slots, sampling_params, maxima), pdl_options(device)
    grid = rows, min(chunks, max(tuning.min_programs_of_row, tuning.max_programs // rows))
    sizes: dict[str, Any] = {"VOCAB": vocab, "CHUNKS": chunks}
    chunk_maxima_kernel[grid](*known, logits.stride(0), **sizes, CHUNK=tuning.chunk, num_warps=8, **pdl)
    sizes |= {
        "CHUNKS_BLOCK": triton.next_power_of_2(chunks),
        "PIVOTS": PIVOTS,
        "SPARE_BITS": _SPARE_BITS[logits.dtype],
    }
    room: dict[str, Any] = {"MAX_CANDIDATES": tuning.max_candidates}
    each: dict[str, Any] = {"CHUNK": tuning.chunk, "BLOCK": tuning.block, "num_warps": 4}
    partial_sums_kernel[grid](*known, sums, logits.stride(0), **sizes, **each, **pdl)
    gather_candidates_kernel[grid](*known, sums, candidates, logits.stride(0), **sizes, **each, **room, **pdl)
    find_thresholds_kernel[(rows,)](
        *known, sums, candidates, thresholds, logits.stride(0), **sizes, **room, num_warps=8, **pdl
    )
    return thresholds, maxima


@triton.jit(do_not_specialize_on_alignment=["slots"])
def chunk_maxima_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    sampling_params: tl.tensor,
    maxima: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the largest logit of each chunk of one row, if the row requests top_k, top_p or min_p.

    Grid: (rows, programs of a row), which take turns at its CHUNKS chunks of CHUNK logits.

    logits              [rows, VOCAB] of any floating type, rows ``stride`` apart
    slots               int32 [rows]
    sampling_params     float32 [slots, 4]: temperature, top_k, top_p, min_p
    maxima              float32 [rows, CHUNKS], written
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, _, is_searched = load_sampling_params(slots, sampling_params, row, VOCAB)
    min_p = tl.load(sampling_params + tl.load(slots + row).to(tl.int64) * 4 + 3)
    if is_searched | ((temperature > 0) & (min_p > 0)):
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
            tl.store(maxima + row * CHUNKS + chunk, tl.max(logit, 0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def partial_sums_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    sampling_params: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum up, for each chunk of one row, the logits at or above each of the first PIVOTS keys.

    Grid: (rows, programs of a row), as ``chunk_maxima_kernel``, whose arguments these are and

    maxima              float32 [rows, CHUNKS], read
    sums                float32 [rows, CHUNKS, 2, PIVOTS], written: the amount that the target is compared with (a
                        count where top_k applies, else a softmax weight), and the count
    BLOCK               logits that are in registers at a time
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, by_count, is_searched = load_sampling_params(slots, sampling_params, row, VOCAB)
    if is_searched:
        largest, keys = _first_pivots(maxima, row, temperature, CHUNKS, CHUNKS_BLOCK, PIVOTS, SPARE_BITS)
        scale = _LOG2_E / temperature
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            own, size = logits + row * stride + chunk * CHUNK, tl.minimum(VOCAB - chunk * CHUNK, CHUNK)
            cell = sums + ((row * CHUNKS + chunk) * 2) * PIVOTS + tl.arange(0, PIVOTS)
            bounds = largest, scale
            tl.store(cell, sums_at_or_above(own, size, keys, *bounds, by_count, PIVOTS, BLOCK, SPARE_BITS))
            tl.store(
                cell + PIVOTS, sums_at_or_above(own, size, keys, *bounds, True, PIVOTS, BLOCK, SPARE_BITS)
            )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def gather_candidates_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    sampling_params: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Gather one row's logits at or above the selected pivot, in their order, if there is room for all of them.

    Grid: (rows, programs of a row), as ``chunk_maxima_kernel``. The counts of the chunks before a chunk say where its
    logits go, so programs need not wait for each other.

    candidates          float32 [rows, MAX_CANDIDATES], written

    The other arguments are those of ``partial_sums_kernel``; ``sums`` is read.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, by_count, is_searched = load_sampling_params(
        slots, sampling_params, row, VOCAB
    )
    if is_searched:
        counts, low, _, _, _, _, _ = select_pivot(
            maxima, sums, row, temperature, top_k, top_p, by_count, CHUNKS, CHUNKS_BLOCK, PIVOTS, SPARE_BITS
        )
        if tl.sum(counts, 0) <= MAX_CANDIDATES:
            for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
                before = tl.sum(tl.where(tl.arange(0, CHUNKS_BLOCK) < chunk, counts, 0), 0)
                target = candidates + row * MAX_CANDIDATES + before
                own, size = logits + row * stride + chunk * CHUNK, tl.minimum(VOCAB - chunk * CHUNK, CHUNK)
                _gather(own, size, low, target, BLOCK, SPARE_BITS)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def find_thresholds_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    sampling_params: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    thresholds: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the least scaled logit that one row keeps, among its candidates or in the whole row.

    Grid: (rows).

    candidates          float32 [rows, MAX_CANDIDATES], read
    thresholds          float32 [rows], written; -inf for a row that is not searched

    The other arguments are those of ``partial_sums_kernel``; ``sums`` is read.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, by_count, is_searched = load_sampling_params(
        slots, sampling_params, row, VOCAB
    )
    threshold = -float("inf")
    if is_searched:
        counts, low, high, end, largest, scale, target = select_pivot(
            maxima, sums, row, temperature, top_k, top_p, by_count, CHUNKS, CHUNKS_BLOCK, PIVOTS, SPARE_BITS
        )
        bounds = low, high, end, largest, scale, target, top_p, by_count
        count = tl.sum(counts, 0)
        if count <= MAX_CANDIDATES:
            own = candidates + row * MAX_CANDIDATES
            low = search_threshold(own, count, *bounds, PIVOTS, MAX_CANDIDATES, SPARE_BITS)
        else:
            low = search_threshold(logits + row * stride, VOCAB, *bounds, PIVOTS, MAX_CANDIDATES, SPARE_BITS)
        threshold = tl.div_rn(number_of(low, SPARE_BITS), temperature)
    tl.store(thresholds + row, threshold)


@triton.jit
def load_sampling_params(
    slots: tl.tensor, sampling_params: tl.tensor, row: tl.tensor, VOCAB: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (temperature, top_k, top_p, by_count, is_searched) of a row.

    ``by_count``: top_k leaves tokens out. ``is_searched``: the row is drawn, and top_k or top_p leaves tokens out.
    """
    own = sampling_params + tl.load(slots + row).to(tl.int64) * 4
    temperature, top_k, top_p = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    by_count = (top_k > 0) & (top_k < VOCAB)
    return temperature, top_k, top_p, by_count, (temperature > 0) & (by_count | (top_p < 1))


@triton.jit
def _first_pivots(
    maxima: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (the row's largest logit, the first pass's keys int64 [PIVOTS], of which the last is below all numbers).

    Three launches compute them and must get the same: all distances are exact multiples of one product.
    """
    chunk = tl.arange(0, CHUNKS_BLOCK)
    largest = tl.max(tl.load(maxima + row * CHUNKS + chunk, chunk < CHUNKS, -float("inf")), 0)
    pivot = tl.arange(0, PIVOTS)
    is_last = pivot == PIVOTS - 1
    distance = tl.where(is_last, float("inf"), NEAREST_PIVOT * temperature * tl.exp2(pivot.to(tl.float32)))
    return largest, key_of(largest - distance, SPARE_BITS).to(tl.int64)


@triton.jit
def select_pivot(
    maxima: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    by_count: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add up the sums of a row's chunks and select the two first-pass keys between which the target is reached.

    Returns
        counts      int32 [CHUNKS_BLOCK]: logits of each chunk at or above ``low``
        low         the highest key with at least the target at or above it
        high        the next key, which has less
        end         one more than the key of the largest logit
        largest     the largest logit
        scale       log2(e) / temperature: exp2((logit - largest) * scale) is the weight of a logit
        target      top_k where it applies, else top_p times the weight of the whole row
    """
    largest, keys = _first_pivots(maxima, row, temperature, CHUNKS, CHUNKS_BLOCK, PIVOTS, SPARE_BITS)
    chunk = tl.arange(0, CHUNKS_BLOCK)[:, None]
    cell = sums + ((row * CHUNKS + chunk) * 2) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    total = tl.sum(tl.load(cell, chunk < CHUNKS, 0.0), 0)
    target = tl.where(by_count, top_k, top_p * tl.max(total, 0))
    low = tl.max(tl.where(total >= target, keys, tl.min(keys, 0)), 0)
    end = key_of(largest, SPARE_BITS).to(tl.int64) + 1
    high = tl.min(tl.where(total >= target, end, keys), 0)
    counts = tl.load(cell + PIVOTS, (chunk < CHUNKS) & (keys == low)[None, :], 0.0)
    return tl.max(counts, 1).to(tl.int32), low, high, end, largest, _LOG2_E / temperature, target


@triton.jit
def _gather(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    BLOCK: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> None:
    """Write those of ``count`` numbers whose keys are ``low`` or more to ``target``, one after another."""
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        number = tl.load(numbers + at, at < count, -float("inf")).to(tl.float32)
        taken = ((key_of(number, SPARE_BITS) >= low) & (at < count)).to(tl.int32)
        tl.store(target + tl.cumsum(taken, 0) - 1, number, taken > 0)
        target += tl.sum(taken, 0)


@triton.jit
def search_threshold(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    end: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    target: tl.tensor,
    top_p: tl.tensor,
    by_count: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the key of the least of ``count`` numbers that is kept; the bounds are ``select_pivot``'s."""
    if by_count:
        low = _search(numbers, count, low, high, largest, scale, target, True, PIVOTS, BLOCK, SPARE_BITS)
        # top_p is a fraction of the weight of the top_k largest: all numbers above the threshold, and as many of
        # those equal to it as top_k still admits.
        above = low + 1 + tl.zeros((PIVOTS,), tl.int64)
        num_above = tl.max(
            sums_at_or_above(numbers, count, above, largest, scale, True, PIVOTS, BLOCK, SPARE_BITS), 0
        )
        weight = tl.max(
            sums_at_or_above(numbers, count, above, largest, scale, False, PIVOTS, BLOCK, SPARE_BITS), 0
        )
        weight += (target - num_above) * tl.exp2((number_of(low, SPARE_BITS) - largest) * scale)
        target, high = top_p * weight, end
    if top_p < 1:
        low = _search(numbers, count, low, high, largest, scale, target, False, PIVOTS, BLOCK, SPARE_BITS)
    return low


@triton.jit
def _search(
    numbers: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    target: tl.tensor,
    by_count: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the highest key, from ``low`` to below ``high``, with at least the ``target`` at or above it."""
    pivot = tl.arange(0, PIVOTS).to(tl.int64)
    while high - low > 1:
        pivots = low + 1 + (high - low - 1) * pivot // PIVOTS
        sums = sums_at_or_above(numbers, count, pivots, largest, scale, by_count, PIVOTS, BLOCK, SPARE_BITS)
        low = tl.max(tl.where(sums >= target, pivots, low), 0)
        high = tl.min(tl.where(sums >= target, high, pivots), 0)
    return low


@triton.jit
def sums_at_or_above(
    numbers: tl.tensor,
    count: tl.tensor,
    pivots: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    by_count: tl.tensor,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE_BITS: tl.constexpr,
) -> tl.tensor:
    """Return how many of ``count`` numbers have each key of ``pivots`` at least, or their weights' sum."""
    total = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        inside = at < count
        number = tl.load(numbers + at, inside, -float("inf")).to(tl.float32)
        weight = tl.full((1, BLOCK), 1.0, tl.float32)
        if not by_count:
            weight = tl.exp2((number - largest) * scale)
        taken = (key_of(number, SPARE_BITS) >= pivots[:, None]) & inside
        total += tl.where(taken, weight, 0.0)
    return tl.sum(total, 1)


@triton.jit
def key_of(number: tl.tensor, SPARE_BITS: tl.constexpr) -> tl.tensor:
    """Return an int32 key that orders float32 numbers: their bits, with those of negative numbers inverted."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE_BITS


@triton.jit
def number_of(key: tl.tensor, SPARE_BITS: tl.constexpr) -> tl.tensor:
    """Return the float32 number that has this key."""
    bits = (key << SPARE_BITS).to(tl.int32)
    bits = (bits ^ ((bits >> 31) & _MAGNITUDE)) >> SPARE_BITS << SPARE_BITS
    return bits.to(tl.float32, bitcast=True)
