"""Sampling of tokens from logits: greedy, or Gumbel-max, by the parameters of each row's slot.

The Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014): the argmax of scaled logits plus Gumbel noise is a draw
from their softmax. So a vocabulary is cut into blocks, one program finds the best token of each, and a second launch
takes the best of these; no softmax, no sum and no sort is needed. The noise is a hash of (seed, position, token), see
``kernels.gumbel``.

Scores and noise are in units of ln 2, because a GPU computes logarithms to base 2 in one instruction.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.sampling.top_k_top_p import find_thresholds
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import NAN_LOGITS

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_NAN_LOGITS = tl.constexpr(NAN_LOGITS)
_LOG2_E = tl.constexpr(math.log2(math.e))
_ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0 in float32; with the bits of a fraction below them they are a number from 1 to 2."""
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)
_SERIES_BELOW = tl.constexpr(0.0625)
"""For 1 - u below this, the series of log2(u) is more accurate than the instruction."""


@triton.jit
def _mix64(value: tl.tensor) -> tl.tensor:
    """Apply two rounds of a 64-bit finalizer, as ``kernels.gumbel`` does."""
    value = (value ^ (value >> 31)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 31)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _log2(value: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return log2(value), off by at most 2**-22 between 0.5 and 2, and relatively by 2**-22 elsewhere."""
    if FAST:
        return libdevice.fast_log2f(value)
    return tl.log2(value)


@triton.jit
def _gumbel(hashed: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return -log2(-log2(u)), where u is made of the upper 23 bits of uint32 hashes.

    That is the noise of ``kernels.gumbel`` divided by ln 2, less the constant log2(ln 2). The largest noise decides
    draws most often; it comes of u near 1, whose logarithm is small: there it is computed as a series in 1 - u, which
    is exact.
    """
    uniform = ((hashed >> 9) | _ONE_BITS).to(tl.float32, bitcast=True) - _BELOW_ONE
    rest = 1.0 - uniform
    series = rest * 0.28853900817779268 + 0.36067376022224085
    series = series * rest + 0.48089834696298783
    series = (series * rest + 0.72134752044448170) * rest + _LOG2_E
    return -_log2(tl.where(rest < _SERIES_BELOW, series * rest, -_log2(uniform, FAST)), FAST)


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, token: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return the Gumbel noise of tokens, by the hash of ``kernels.gumbel`` and in the units of ``_gumbel``."""
    place = position.to(tl.int64).to(tl.uint64, bitcast=True)
    first = _mix64(seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15 + place)
    second = _mix64(first + place)
    mixed = (token.to(tl.uint32, bitcast=True) * 0x9E3779B1) ^ first.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B + second.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return _gumbel(mixed ^ (mixed >> 16), FAST)


@triton.jit
def noisy_scores(
    logit: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    token: tl.tensor,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the scores of tokens whose largest is the draw: logits / temperature plus noise, in units of ln 2."""
    return logit * tl.div_rn(_LOG2_E, temperature) + _noise(seed, position, token, FAST)


@triton.jit
def best_token(score: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return (the largest of a block's scores, its token, the lowest of equally good ones)."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, _NO_TOKEN), 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def sample_blocks_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    sampling_params: tl.tensor,
    thresholds: tl.tensor,
    maxima: tl.tensor,
    scores: tl.tensor,
    candidates: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best token of one block of one row.

    Grid: (rows, blocks of BLOCK logits).

    logits              [rows, VOCAB] of any floating type, rows ``stride`` apart
    slots, positions    int32 [rows]: the row's slot, and where its token will stand
    seeds               int64 [slots]
    sampling_params     float32 [slots, 4]: temperature (0: greedy), top_k, top_p, min_p
    thresholds          float32 [rows]: scaled logits below it are dropped; -inf drops none
    maxima              float32 [rows, CHUNKS]: the largest logits of the row's chunks, written where min_p or a
                        threshold applies
    scores, candidates  float32 and int32 [rows, BLOCKS], written: the best score and its token
    FAST                whether to take the GPU's approximate logarithm, which Triton's interpreter lacks

    NaN compares as false with everything, so a block that contains one would hide it: such a block writes +inf and
    _NAN_LOGITS, which wins over every other block, because it is the lowest of equally good tokens.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    temperature = tl.load(sampling_params + slot * 4)
    if temperature > 0:
        min_p = tl.load(sampling_params + slot * 4 + 3)
        noisy = noisy_scores(score, temperature, tl.load(seeds + slot), tl.load(positions + row), token, FAST)
        threshold = tl.load(thresholds + row)
        if (min_p > 0) | (threshold > -float("inf")):
            # The comparison needs quotients that are rounded like those from which the thresholds came.
            chunk = tl.arange(0, CHUNKS_BLOCK)
            largest = tl.load(maxima + row * CHUNKS + chunk, chunk < CHUNKS, -float("inf"))
            min_p_threshold = tl.div_rn(tl.max(largest, 0), temperature) + tl.log(min_p)
            threshold = tl.maximum(threshold, tl.where(min_p > 0, min_p_threshold, -float("inf")))
            scaled = tl.div_rn(score, temperature + tl.zeros_like(score))
            noisy = tl.where(scaled < threshold, -float("inf"), noisy)
        score = noisy
    best, candidate = best_token(score, token)
    tl.store(scores + row * BLOCKS + block, tl.where(has_nan, float("inf"), best))
    tl.store(candidates + row * BLOCKS + block, tl.where(has_nan, _NAN_LOGITS, candidate))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def sample_tokens_kernel(
    scores: tl.tensor,
    candidates: tl.tensor,
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    token_table: tl.tensor,
    token_table_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Choose the best candidate of one row; of equally good ones, the lowest token.

    Grid: (rows), one warp each.

    scores, candidates  float32 and int32 [rows, BLOCKS]
    tokens              int32 [rows], written
    slots, positions    int32 [rows]
    token_table         int32 [slots, token_table_stride]: with HAS_TABLE, the token is also written to [slot,
                        position]; token 0 in place of _NAN_LOGITS, because the step in flight looks up its embedding
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_BLOCK)
    score = tl.load(scores + row * BLOCKS + block, block < BLOCKS, -float("inf"))
    candidate = tl.load(candidates + row * BLOCKS + block, block < BLOCKS, _NO_TOKEN)
    token = tl.min(tl.where(score == tl.max(score, 0), candidate, _NO_TOKEN), 0)
    token = tl.minimum(token, VOCAB - 1)
    tl.store(tokens + row, token)
    if HAS_TABLE:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(token_table + slot * token_table_stride + tl.load(positions + row), tl.maximum(token, 0))


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    sampling_params: torch.Tensor,
    token_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``kernels.sampling.sample_tokens`` does, with logits of any floating type and rows at any stride."""
    (rows, vocab), device = logits.shape, logits.device
    tuning = tuning_for(device)
    blocks = triton.cdiv(vocab, tuning.sampling_block)
    scores = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    candidates = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return tokens
    thresholds, maxima = find_thresholds(logits, slots, sampling_params)
    options = pdl_options(device)
    sample_blocks_kernel[(rows, blocks)](
        logits,
        slots,
        positions,
        seeds,
        sampling_params,
        thresholds,
        maxima,
        scores,
        candidates,
        logits.stride(0),
        VOCAB=vocab,
        BLOCKS=blocks,
        CHUNKS=maxima.shape[1],
        CHUNKS_BLOCK=triton.next_power_of_2(maxima.shape[1]),
        BLOCK=tuning.sampling_block,
        FAST=device.type == "cuda",
        num_warps=tuning.sampling_warps,
        **options,
    )
    sample_tokens_kernel[(rows,)](
        scores,
        candidates,
        tokens,
        slots,
        positions,
        tokens if token_table is None else token_table,
        0 if token_table is None else token_table.stride(0),
        VOCAB=vocab,
        BLOCKS=blocks,
        BLOCKS_BLOCK=triton.next_power_of_2(blocks),
        HAS_TABLE=token_table is not None,
        num_warps=1,
        **options,
    )
    return tokens
