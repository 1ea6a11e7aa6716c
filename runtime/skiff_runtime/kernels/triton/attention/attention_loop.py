"""The loop of decode attention: scores, online softmax and weighted sum over pages of the KV cache, in one pass.

Each program keeps, for its queries, the softmax state of the tokens seen so far: ``acc`` (the weighted sum of
values), ``l_i`` (the sum of weights) and ``m_i`` (the largest score). ``online_softmax_update`` moves the state on by
one block of tokens (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Scores are in units of ln 2,
because a GPU computes powers of two in one instruction.

There are three versions of the loop, because tensor cores multiply tiles of at least 16 x 8:

- up to eight queries: tokens are the 16 and queries the 8, so that half as much is computed for padding as the other
  way round;
- more queries: queries come first, which is faster there;
- an FP8 cache: two neighbouring numbers of a head are loaded as one of 16 bits, because numbers of 16 bits can be
  transposed on their way from shared memory to the tensor cores, and bytes cannot.
"""

from typing import Final

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.fp8.dequantize import dequantize_pairs

LOG2_E: Final = 1.4426950408889634
"""Scores are multiplied by it, so that exp(score) becomes a power of two."""
MIN_PAIRED_DIM = tl.constexpr(32)
"""The fewest dimensions of a head of which the FP8 loop can multiply the even and the odd half."""
FEW_QUERIES = tl.constexpr(8)
"""The fewest columns that the tensor cores multiply, and so the most queries that come second."""

_CACHED = tl.constexpr("")
"""The modifier of an ordinary load."""


def padded_head_dim(dim: int) -> int:
    """Round the dimensions of a head up to what a kernel can hold: a power of two, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.jit
def attention_loop(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the tokens from ``begin`` to ``end`` of one row; return (acc, l_i, m_i), all float32.

    acc                 [Q, DIM_BLOCK]: the sum of values, not yet divided by ``l_i``
    l_i, m_i            [Q]
    query               [Q, DIM_BLOCK] block in registers; DIM_BLOCK is DIM rounded up, with zeros
    keys, values        pointers to [tokens of the pool, KV, DIM], in the type of the model or in FP8
    page_table          pointer to the row's line of the page table, int32; token t is in page t // PAGE
    begin, end          the tokens to attend to
    kv_head             the KV head of the queries
    scale               log2(e) / sqrt(DIM)
    BLOCK               tokens of one iteration
    PRECISION           "tf32", or "ieee" for float32
    USE_PTX             whether FP8 may be converted by a GPU's own instructions
    """
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.bfloat16:
        # A GPU converts FP8 to float16 in one instruction; to bfloat16 it takes four times as long.
        query = query.to(tl.float16)
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.float16 and query.shape[1] >= MIN_PAIRED_DIM:
        acc, l_i, m_i = _fp8_loop(
            query, keys, values, page_table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, USE_PTX
        )
    elif query.shape[0] <= FEW_QUERIES:
        acc, l_i, m_i = _tokens_first_loop(
            query, keys, values, page_table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION
        )
    else:
        acc, l_i, m_i = _queries_first_loop(
            query, keys, values, page_table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION
        )
    return acc, l_i, m_i


@triton.jit
def _tokens_first_loop(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
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
    """Run the loop with scores [BLOCK, Q] and the sum transposed, [DIM_BLOCK, Q]."""
    QUERIES: tl.constexpr = query.shape[0]
    DIM_BLOCK: tl.constexpr = query.shape[1]
    column = tl.arange(0, DIM_BLOCK)
    in_head = column < DIM
    query = tl.trans(query)
    acc = tl.zeros((DIM_BLOCK, QUERIES), tl.float32)
    l_i, m_i = init_online_softmax(QUERIES)
    for first in range(begin, end, BLOCK):
        _, seen, offset = paged_kv_offsets(first, end, page_table, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + offset[:, None] + column[None, :], seen[:, None] & in_head[None, :], 0.0)
        score = tl.dot(key.to(query.dtype), query, input_precision=PRECISION) * scale
        weight, alpha, l_i, m_i = online_softmax_update(score, seen[:, None], l_i, m_i, 0)
        value = tl.load(values + offset[None, :] + column[:, None], seen[None, :] & in_head[:, None], 0.0)
        acc = tl.dot(
            value.to(query.dtype), weight.to(query.dtype), acc * alpha[None, :], input_precision=PRECISION
        )
    return tl.trans(acc), l_i, m_i


@triton.jit
def _queries_first_loop(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
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
    """Run the loop with scores [Q, BLOCK] and the sum [Q, DIM_BLOCK]."""
    column = tl.arange(0, query.shape[1])
    in_head = column < DIM
    acc = tl.zeros(query.shape, tl.float32)
    l_i, m_i = init_online_softmax(query.shape[0])
    for first in range(begin, end, BLOCK):
        _, seen, offset = paged_kv_offsets(first, end, page_table, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + offset[None, :] + column[:, None], seen[None, :] & in_head[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        weight, alpha, l_i, m_i = online_softmax_update(score, seen[None, :], l_i, m_i, 1)
        value = tl.load(values + offset[:, None] + column[None, :], seen[:, None] & in_head[None, :], 0.0)
        acc = tl.dot(
            weight.to(query.dtype), value.to(query.dtype), acc * alpha[:, None], input_precision=PRECISION
        )
    return acc, l_i, m_i


@triton.jit
def _fp8_loop(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PTX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Run the loop with float16 queries over an FP8 cache: even and odd dimensions apart, tokens first."""
    QUERIES: tl.constexpr = query.shape[0]
    PAIRS: tl.constexpr = query.shape[1] // 2
    keys = keys.to(tl.pointer_type(tl.int16))
    values = values.to(tl.pointer_type(tl.int16))
    column = tl.arange(0, PAIRS)
    in_head = column < DIM // 2
    query_even, query_odd = tl.split(tl.reshape(query, (QUERIES, PAIRS, 2)))
    query_even, query_odd = tl.trans(query_even), tl.trans(query_odd)
    acc_even = tl.zeros((PAIRS, QUERIES), tl.float32)
    acc_odd = tl.zeros((PAIRS, QUERIES), tl.float32)
    l_i, m_i = init_online_softmax(QUERIES)
    for first in range(begin, end, BLOCK):
        _, seen, offset = paged_kv_offsets(first, end, page_table, kv_head, KV, DIM // 2, PAGE, BLOCK)
        key = tl.load(keys + offset[:, None] + column[None, :], seen[:, None] & in_head[None, :], 0)
        key_even, key_odd = dequantize_pairs(key, USE_PTX)
        score = tl.dot(key_odd, query_odd, tl.dot(key_even, query_even)) * scale
        weight, alpha, l_i, m_i = online_softmax_update(score, seen[:, None], l_i, m_i, 0)
        weight = weight.to(tl.float16)
        value = tl.load(values + offset[None, :] + column[:, None], seen[None, :] & in_head[:, None], 0)
        value_even, value_odd = dequantize_pairs(value, USE_PTX)
        acc_even = tl.dot(value_even, weight, acc_even * alpha[None, :])
        acc_odd = tl.dot(value_odd, weight, acc_odd * alpha[None, :])
    return tl.interleave(tl.trans(acc_even), tl.trans(acc_odd)), l_i, m_i


@triton.jit
def paged_kv_offsets(
    first: tl.tensor,
    end: tl.tensor,
    page_table: tl.tensor,
    kv_head: tl.tensor,
    KV: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CACHE: tl.constexpr = _CACHED,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (tokens, seen, offsets), each [BLOCK], of the tokens from ``first`` on.

    ``seen`` marks the tokens before ``end``; ``offsets`` int64 are where K and V of ``kv_head`` begin in a pool whose
    heads are ``WIDTH`` elements wide. ``CACHE`` is the modifier of the load of the page table.
    """
    token = first + tl.arange(0, BLOCK)
    seen = token < end
    page = tl.load(page_table + token // PAGE, seen, 0, cache_modifier=CACHE).to(tl.int64)
    return token, seen, (page * PAGE + token % PAGE) * (KV * WIDTH) + kv_head * WIDTH


@triton.jit
def init_online_softmax(QUERIES: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (l_i, m_i), both [Q], before the first token."""
    return tl.zeros((QUERIES,), tl.float32), tl.full((QUERIES,), -float("inf"), tl.float32)


@triton.jit
def online_softmax_update(
    score: tl.tensor,
    seen: tl.tensor,
    l_i: tl.tensor,
    m_i: tl.tensor,
    TOKENS: tl.constexpr,
    SKIPS_QUERIES: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take one block of scores into the softmax state; return (weights, alpha, l_i, m_i).

    ``score`` has tokens in its dimension ``TOKENS`` (0 or 1) and the Q queries in the other; scores whose ``seen``,
    which broadcasts, is false count as minus infinity. ``weights`` are of the shape of ``score``; ``alpha`` [Q] is
    the factor by which the caller has to scale what it accumulated before. Without SKIPS_QUERIES, every query must see
    a token of the first block.
    """
    score = tl.where(seen, score, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(score, TOKENS))
    largest = m_new
    if SKIPS_QUERIES:  # as long as a query has seen no token, the differences below would be inf - inf
        largest = tl.where(m_new > -float("inf"), m_new, 0.0)
    weight = tl.exp2(score - tl.expand_dims(largest, TOKENS))
    alpha = tl.exp2(m_i - largest)
    return weight, alpha, l_i * alpha + tl.sum(weight, TOKENS), m_new
