"""The loop of decode attention: scores, softmax and sum over pages, in one pass (Milakov and Gimelshein, 2018)."""

import triton
import triton.language as tl


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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax state of queries [H, d] over the tokens from ``begin`` to ``end`` of a line of the page table."""
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.bfloat16:
        query = query.to(
            tl.float16
        )  # to which a GPU widens eight bits at once; to bfloat16 it takes four times as long
    column = tl.arange(0, query.shape[1])
    mixed = tl.zeros(query.shape, tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    highest = tl.full((query.shape[0],), -float("inf"), tl.float32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < end
        page = tl.load(table + token // PAGE, seen, 0).to(tl.int64)
        place = (page * PAGE + token % PAGE) * (KV * DIM) + kv_head * DIM
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & (column < DIM)[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        share_of = tl.exp2(score - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(share_of, 1)
        value = tl.load(
            values + place[:, None] + column[None, :], seen[:, None] & (column < DIM)[None, :], 0.0
        )
        mixed = tl.dot(
            share_of.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision=PRECISION
        )
        highest = higher
    return mixed, total, highest
