"""The choice of tokens: greedy, or a draw by Gumbel noise, each row by the parameters of its slot."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Logits of a row that one program chooses from."""
MAXIMA_BLOCK = 8192
"""Logits of a row whose largest one program finds; most have nothing to find, so they should be few."""
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix64(value: tl.tensor) -> tl.tensor:
    """Two rounds of a 64-bit finalizer, as ``kernels.gumbel``."""
    value = (value ^ (value >> 31)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 31)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Gumbel noise of tokens, as ``kernels.gumbel``."""
    place = position.to(tl.int64).to(tl.uint64, bitcast=True)
    first = _mix64(seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15 + place)
    second = _mix64(first + place)
    mixed = (token.to(tl.uint32, bitcast=True) * 0x9E3779B1) ^ first.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B + second.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    uniform = ((mixed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _find_maxima(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    maxima: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The largest scaled logit of each part of the rows that have a min_p."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(filters + slot * 4 + 3) > 0:
        temperature = tl.load(filters + slot * 4)
        if temperature > 0:
            token = part * BLOCK + tl.arange(0, BLOCK)
            logit = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
            tl.store(maxima + row * PARTS + part, tl.div_rn(tl.max(logit, 0), temperature))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _choose_parts(
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
    FLOORS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The best token of each part of each row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, token < VOCAB, -float("inf")).to(tl.float32)
    temperature = tl.load(filters + slot * 4)
    if temperature > 0:
        score = tl.div_rn(score, temperature + tl.zeros_like(score))
        min_p = tl.load(filters + slot * 4 + 3)
        parts = tl.arange(0, MAXIMA_BLOCK)
        largest = tl.load(maxima + row * MAXIMA + parts, parts < MAXIMA, -float("inf"))
        floor = tl.where(min_p > 0, tl.max(largest, 0) + tl.log(min_p), -float("inf"))
        if FLOORS:
            floor = tl.maximum(floor, tl.load(floors + row))
        noise = _noise(tl.load(seeds + slot), tl.load(positions + row), token)
        score = tl.where(score < floor, -float("inf"), score + noise)
    top = tl.max(score, 0)
    tl.store(best + row * PARTS + part, top)
    tl.store(chosen + row * PARTS + part, tl.min(tl.where(score == top, token, _NOWHERE), 0))


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
) -> None:
    """The best of the parts; of equal ones, the lowest token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    score = tl.load(best + row * PARTS + part, part < PARTS, -float("inf"))
    token = tl.load(chosen + row * PARTS + part, part < PARTS, _NOWHERE)
    choice = tl.min(tl.where(score == tl.max(score, 0), token, _NOWHERE), 0)
    choice = tl.minimum(choice, VOCAB - 1)
    tl.store(tokens + row, choice)
    if HISTORY:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(history + slot * history_stride + tl.load(positions + row), choice)


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    filters: torch.Tensor,
    floors: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kernels.sampling.choose``; logits of any type, with rows at any stride."""
    rows, vocab = logits.shape
    parts, maxima_parts = triton.cdiv(vocab, BLOCK), triton.cdiv(vocab, MAXIMA_BLOCK)
    device = logits.device
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    maxima = torch.empty((rows, maxima_parts), dtype=torch.float32, device=device)
    chosen = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return tokens
    stride = logits.stride(0)
    _find_maxima[(rows, maxima_parts)](
        logits,
        slots,
        filters,
        maxima,
        stride,
        VOCAB=vocab,
        PARTS=maxima_parts,
        BLOCK=MAXIMA_BLOCK,
        num_warps=8,
    )
    _choose_parts[(rows, parts)](
        logits,
        slots,
        positions,
        seeds,
        filters,
        maxima if floors is None else floors,
        maxima,
        best,
        chosen,
        stride,
        VOCAB=vocab,
        PARTS=parts,
        MAXIMA=maxima_parts,
        MAXIMA_BLOCK=triton.next_power_of_2(maxima_parts),
        FLOORS=floors is not None,
        BLOCK=BLOCK,
        num_warps=4,
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
    )
    return tokens
