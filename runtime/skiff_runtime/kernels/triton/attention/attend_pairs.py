"""The loop of decode attention over a cache in e4m3, two numbers at a time."""

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.places import paged_kv_offsets
from skiff_runtime.kernels.triton.attention.softmax import init_online_softmax, online_softmax_update
from skiff_runtime.kernels.triton.fp8.dequantize import dequantize_pairs


@triton.jit
def attend_to_pairs(
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
    USE_PTX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As ``attend``, with queries in float16 over K and V in e4m3."""
    HEADS: tl.constexpr = query.shape[0]
    PAIRS: tl.constexpr = query.shape[1] // 2
    keys = keys.to(tl.pointer_type(tl.int16))
    values = values.to(tl.pointer_type(tl.int16))
    column = tl.arange(0, PAIRS)
    inside = column < DIM // 2
    query_even, query_odd = tl.split(tl.reshape(query, (HEADS, PAIRS, 2)))
    query_even, query_odd = tl.trans(query_even), tl.trans(query_odd)
    mixed_even = tl.zeros((PAIRS, HEADS), tl.float32)
    mixed_odd = tl.zeros((PAIRS, HEADS), tl.float32)
    total, highest = init_online_softmax(HEADS)
    for first in range(begin, end, BLOCK):
        _, seen, place = paged_kv_offsets(first, end, table, kv_head, KV, DIM // 2, PAGE, BLOCK)
        key = tl.load(keys + place[:, None] + column[None, :], seen[:, None] & inside[None, :], 0)
        key_even, key_odd = dequantize_pairs(key, USE_PTX)
        score = tl.dot(key_odd, query_odd, tl.dot(key_even, query_even)) * scale
        share, kept, total, highest = online_softmax_update(score, seen[:, None], total, highest, 0)
        share = share.to(tl.float16)
        value = tl.load(values + place[None, :] + column[:, None], seen[None, :] & inside[:, None], 0)
        value_even, value_odd = dequantize_pairs(value, USE_PTX)
        mixed_even = tl.dot(value_even, share, mixed_even * kept[None, :])
        mixed_odd = tl.dot(value_odd, share, mixed_odd * kept[None, :])
    return tl.interleave(tl.trans(mixed_even), tl.trans(mixed_odd)), total, highest
