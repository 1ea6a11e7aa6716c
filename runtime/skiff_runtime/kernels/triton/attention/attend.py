"""Scores, softmax and sum over pages in one pass: the loop of decode attention.

The tensor cores multiply 16 by 8 at least. With tokens as the sixteen, up to eight queries leave half as much to be computed
for nobody as with queries as the sixteen. More queries are faster as the first side of a product.
"""

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.attend_pairs import attend_to_pairs
from skiff_runtime.kernels.triton.attention.places import paged_kv_offsets
from skiff_runtime.kernels.triton.attention.softmax import init_online_softmax, online_softmax_update

LEAST_PAIRED = tl.constexpr(32)
"""Of a head's numbers, half of which the tensor cores then multiply at a time."""
FEW_QUERIES = tl.constexpr(8)
"""Which the tensor cores multiply at least, behind tokens. More come first in products."""


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
    USE_PTX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax state of queries [H, d] over the tokens from ``begin`` to ``end`` of a line of the page table."""
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.bfloat16:
        query = query.to(
            tl.float16
        )  # to which a GPU widens eight bits at once; to bfloat16 it takes four times as long
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.float16 and query.shape[1] >= LEAST_PAIRED:
        mixed, total, highest = attend_to_pairs(
            query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, USE_PTX
        )
    elif query.shape[0] <= FEW_QUERIES:
        mixed, total, highest = _attend_to_numbers(
            query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION
        )
    else:
        mixed, total, highest = _attend_with_many(
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
    HEADS: tl.constexpr = query.shape[0]
    DIM_BLOCK: tl.constexpr = query.shape[1]
    column = tl.arange(0, DIM_BLOCK)
    inside = column < DIM
    query = tl.trans(query)
    mixed = tl.zeros((DIM_BLOCK, HEADS), tl.float32)
    total, highest = init_online_softmax(HEADS)
    for first in range(begin, end, BLOCK):
        _, seen, place = paged_kv_offsets(first, end, table, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + place[:, None] + column[None, :], seen[:, None] & inside[None, :], 0.0)
        score = tl.dot(key.to(query.dtype), query, input_precision=PRECISION) * scale
        share, kept, total, highest = online_softmax_update(score, seen[:, None], total, highest, 0)
        value = tl.load(values + place[None, :] + column[:, None], seen[None, :] & inside[:, None], 0.0)
        mixed = tl.dot(
            value.to(query.dtype), share.to(query.dtype), mixed * kept[None, :], input_precision=PRECISION
        )
    return tl.trans(mixed), total, highest


@triton.jit
def _attend_with_many(
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
    """The same with queries first."""
    column = tl.arange(0, query.shape[1])
    inside = column < DIM
    mixed = tl.zeros(query.shape, tl.float32)
    total, highest = init_online_softmax(query.shape[0])
    for first in range(begin, end, BLOCK):
        _, seen, place = paged_kv_offsets(first, end, table, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & inside[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        share, kept, total, highest = online_softmax_update(score, seen[None, :], total, highest, 1)
        value = tl.load(values + place[:, None] + column[None, :], seen[:, None] & inside[None, :], 0.0)
        mixed = tl.dot(
            share.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision=PRECISION
        )
    return mixed, total, highest
