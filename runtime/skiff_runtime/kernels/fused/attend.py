"""Scores, softmax and sum over pages in one pass (Milakov and Gimelshein, 2018): the loop of decode attention, and its parts."""

from typing import Final

import triton
import triton.language as tl

from skiff_runtime.kernels.fused.widen import widen_pairs

LOG2_E: Final = 1.4426950408889634

LEAST_PAIRED = tl.constexpr(32)
"""Of a head's numbers, half of which the tensor cores then multiply at a time."""


@triton.jit
def attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax state of queries [H, d] over the tokens from ``begin`` to ``end`` of a line of the page table."""
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.bfloat16:
        query = query.to(
            tl.float16
        )  # to which a GPU widens eight bits at once; to bfloat16 it takes four times as long
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.float16 and query.shape[1] >= LEAST_PAIRED:
        mixed, total, highest = _attend_to_pairs(
            query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, ASSEMBLY
        )
    else:
        mixed, total, highest = _attend_to_numbers(
            query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION
        )
    return mixed, total, highest


@triton.jit
def _attend_to_numbers(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    column = tl.arange(0, query.shape[1])
    inside = column < DIM
    mixed = tl.zeros(query.shape, tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    highest = tl.full((query.shape[0],), -float("inf"), tl.float32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < end
        place = places_of(token, seen, table, kv_head, KV, DIM, PAGE)
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & inside[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        share, kept, total, highest = soften(score, seen[None, :], total, highest)
        value = tl.load(values + place[:, None] + column[None, :], seen[:, None] & inside[None, :], 0.0)
        mixed = tl.dot(
            share.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision=PRECISION
        )
    return mixed, total, highest


@triton.jit
def _attend_to_pairs(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The same over e4m3, two numbers at a time, with queries in float16."""
    HEADS: tl.constexpr = query.shape[0]
    PAIRS: tl.constexpr = query.shape[1] // 2
    keys = keys.to(tl.pointer_type(tl.int16))
    values = values.to(tl.pointer_type(tl.int16))
    column = tl.arange(0, PAIRS)
    inside = column < DIM // 2
    query_even, query_odd = tl.split(tl.reshape(query, (HEADS, PAIRS, 2)))
    mixed_even = tl.zeros((HEADS, PAIRS), tl.float32)
    mixed_odd = tl.zeros((HEADS, PAIRS), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    highest = tl.full((HEADS,), -float("inf"), tl.float32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < end
        place = places_of(token, seen, table, kv_head, KV, DIM // 2, PAGE)
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & inside[:, None], 0)
        key_even, key_odd = widen_pairs(key, ASSEMBLY)
        score = tl.dot(query_odd, key_odd, tl.dot(query_even, key_even)) * scale
        share, kept, total, highest = soften(score, seen[None, :], total, highest)
        share = share.to(tl.float16)
        value = tl.load(values + place[:, None] + column[None, :], seen[:, None] & inside[None, :], 0)
        value_even, value_odd = widen_pairs(value, ASSEMBLY)
        mixed_even = tl.dot(share, value_even, mixed_even * kept[:, None])
        mixed_odd = tl.dot(share, value_odd, mixed_odd * kept[:, None])
    return tl.interleave(mixed_even, mixed_odd), total, highest


@triton.jit
def places_of(
    token: tl.tensor,
    seen: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    KV: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Where K and V of tokens begin, for heads that are so wide."""
    page = tl.load(table + token // PAGE, seen, 0).to(tl.int64)
    return (page * PAGE + token % PAGE) * (KV * WIDTH) + kv_head * WIDTH


@triton.jit
def soften(
    score: tl.tensor, seen: tl.tensor, total: tl.tensor, highest: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(Shares of these tokens, by what earlier sums shrink, the new total, the new highest score).

    ``score`` [Q, T], ``seen`` [Q, T] or [1, T] tells which of them count, ``total`` and ``highest`` [Q].
    """
    score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(highest, tl.max(score, 1))
    share = tl.exp2(score - higher[:, None])
    kept = tl.exp2(highest - higher)
    return share, kept, total * kept + tl.sum(share, 1), higher
