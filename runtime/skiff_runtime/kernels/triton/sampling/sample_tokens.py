"""The choice of tokens: greedy, or a draw by Gumbel noise, each row by the parameters of its slot.

Scores and noise are in units of ln 2 here, as what a GPU computes in one instruction is the logarithm to base 2.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from skiff_runtime.kernels.triton.attention.softmax import LOG2_E
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.sampling.top_k_top_p import find_thresholds
from skiff_runtime.step import NAN_LOGITS

BLOCK = 2048
"""Logits of a row that one program chooses from."""
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_NAN_LOGITS = tl.constexpr(NAN_LOGITS)
_LOG2_E = tl.constexpr(LOG2_E)
_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0; those of a fraction below them make a number from 1 to 2."""
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)
_NEAR = tl.constexpr(0.0625)
"""So far below 1, the series is more accurate than the instruction."""


@triton.jit
def _mix64(value: tl.tensor) -> tl.tensor:
    """Two rounds of a 64-bit finalizer, as ``kernels.gumbel``."""
    value = (value ^ (value >> 31)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 31)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _log2(value: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Within 2**-22 from 0.5 to 2, elsewhere within 2**-22 of its value."""
    if FAST:
        return libdevice.fast_log2f(value)
    return tl.log2(value)


@triton.jit
def _gumbel(hashed: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """-log2(-log2(u)) with u of the upper 23 bits of uint32 hashes: ``kernels.gumbel`` over ln 2, and log2(ln 2) less.

    Near 1, u decides draws most often and its logarithm is small: there it is a series of 1 - u, which is exact.
    """
    uniform = ((hashed >> 9) | _ONE).to(tl.float32, bitcast=True) - _BELOW_ONE
    rest = 1.0 - uniform
    series = rest * 0.28853900817779268 + 0.36067376022224085
    series = series * rest + 0.48089834696298783
    series = (series * rest + 0.72134752044448170) * rest + _LOG2_E
    return -_log2(tl.where(rest < _NEAR, series * rest, -_log2(uniform, FAST)), FAST)


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, token: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Gumbel noise of tokens, as ``kernels.gumbel``, in the units of ``_gumbel``."""
    place = position.to(tl.int64).to(tl.uint64, bitcast=True)
    first = _mix64(seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15 + place)
    second = _mix64(first + place)
    mixed = (token.to(tl.uint32, bitcast=True) * 0x9E3779B1) ^ first.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B + second.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return _gumbel(mixed ^ (mixed >> 16), FAST)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def sample_chunks_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    filters: tl.tensor,
    floors: tl.tensor,
    maxima: tl.tensor,
    best: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    MAXIMA: tl.constexpr,
    MAXIMA_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best token of one part of one row. Grid: (rows, parts of BLOCK logits).

    ``logits`` [rows, VOCAB] of any type, at ``stride``; ``slots`` and ``positions`` int32[rows]; ``seeds`` int64[slots],
    ``filters`` float32[slots, 4]; ``floors`` float32[rows] and ``maxima`` float32[rows, MAXIMA] as ``find_thresholds`` returns
    them. Writes the best score and its token to ``best`` float32 and ``chosen`` int32 [rows, PARTS]. NaN compares as
    false with everything, so a part that contains one would hide it: it writes +inf and _NAN_LOGITS instead, which wins
    over every other part, for it is the lowest of the equally good tokens.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    temperature = tl.load(filters + slot * 4)
    if temperature > 0:
        min_p = tl.load(filters + slot * 4 + 3)
        noise = _noise(tl.load(seeds + slot), tl.load(positions + row), token, FAST)
        floor = tl.load(floors + row)
        kept = score * tl.div_rn(_LOG2_E, temperature) + noise
        if (min_p > 0) | (floor > -float("inf")):  # which want a quotient as exact as their own
            parts = tl.arange(0, MAXIMA_BLOCK)
            largest = tl.load(maxima + row * MAXIMA + parts, parts < MAXIMA, -float("inf"))
            least = tl.div_rn(tl.max(largest, 0), temperature) + tl.log(min_p)
            floor = tl.maximum(floor, tl.where(min_p > 0, least, -float("inf")))
            kept = tl.where(tl.div_rn(score, temperature + tl.zeros_like(score)) < floor, -float("inf"), kept)
        score = kept
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, token, _NOWHERE), 0)
    tl.store(best + row * PARTS + part, tl.where(has_nan, float("inf"), top))
    tl.store(chosen + row * PARTS + part, tl.where(has_nan, _NAN_LOGITS, winner))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _choose(
    best: tl.tensor,
    chosen: tl.tensor,
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    history: tl.tensor,
    history_stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    HISTORY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Choose the best of one row's parts; of equally good ones the lowest token. Grid: (rows,), one warp each.

    ``best`` float32 and ``chosen`` int32 [rows, PARTS]; ``tokens`` int32[rows] is written, and where HISTORY is set also
    ``history`` int32[slots, history_stride] at ``slots`` and ``positions`` int32[rows]: token 0 for _NAN_LOGITS, because
    the step in flight looks up its embedding.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    score = tl.load(best + row * PARTS + part, part < PARTS, -float("inf"))
    token = tl.load(chosen + row * PARTS + part, part < PARTS, _NOWHERE)
    choice = tl.min(tl.where(score == tl.max(score, 0), token, _NOWHERE), 0)
    choice = tl.minimum(choice, VOCAB - 1)
    tl.store(tokens + row, choice)
    if HISTORY:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(history + slot * history_stride + tl.load(positions + row), tl.maximum(choice, 0))


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    filters: torch.Tensor,
    history: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kernels.sampling.choose``; logits of any type, with rows at any stride."""
    (rows, vocab), device = logits.shape, logits.device
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    chosen = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return tokens
    floors, maxima = find_thresholds(logits, slots, filters)
    options = pdl_options(device)
    sample_chunks_kernel[(rows, parts)](
        logits,
        slots,
        positions,
        seeds,
        filters,
        floors,
        maxima,
        best,
        chosen,
        logits.stride(0),
        VOCAB=vocab,
        PARTS=parts,
        MAXIMA=maxima.shape[1],
        MAXIMA_BLOCK=triton.next_power_of_2(maxima.shape[1]),
        BLOCK=BLOCK,
        FAST=device.type == "cuda",
        num_warps=4,
        **options,
    )
    _choose[(rows,)](
        best,
        chosen,
        tokens,
        slots,
        positions,
        tokens if history is None else history,
        0 if history is None else history.stride(0),
        VOCAB=vocab,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        HISTORY=history is not None,
        num_warps=1,
        **options,
    )
    return tokens
