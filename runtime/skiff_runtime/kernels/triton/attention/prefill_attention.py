"""Causal attention of prompt chunks over the paged KV cache, without a plan made on the host.

FlashAttention's loop (Dao et al., 2022) with one difference: K and V are found through the page table. It is used
where a step has so few tokens that FlashInfer's planning and launching takes longer than its kernels, and wherever
FlashInfer is not.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.attention_loop import (
    LOG2_E,
    init_online_softmax,
    online_softmax_update,
    padded_head_dim,
    paged_kv_offsets,
)
from skiff_runtime.kernels.triton.runtime.cached_launch import CachedLaunch, LayerKV
from skiff_runtime.kernels.tuning import WIDE_HEAD_DIM, tuning_for


@triton.jit(
    do_not_specialize=["skipped"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths", "offsets"],
)
def prefill_attention_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    offsets: tl.tensor,
    page_table: tl.tensor,
    output: tl.tensor,
    skipped: tl.tensor,
    scale: tl.tensor,
    page_table_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend with QUERY_BLOCK tokens of one chunk, for one query head, to the tokens up to themselves.

    Grid: (blocks of QUERY_BLOCK tokens of the longest chunk, HEADS, chunks). Programs behind the end of their chunk
    return at once. The last blocks of a chunk, which read most, start first. With a sliding window, a program begins
    at the window of its first query, so it reads less than WINDOW + QUERY_BLOCK tokens of any context.

    queries, output     [T, HEADS, DIM], the tokens of all chunks one after another
    keys, values        [tokens of the pool, KV, DIM], in the type of the queries or in FP8; the chunks' own tokens
                        are in there
    slots               int32 [chunks]: the chunk's line of the page table
    starts, lengths     int32 [chunks]: the tokens in the cache before the chunk, and the chunk's own
    offsets             int32 [chunks]: the chunk's first token among the step's, of which the first ``skipped`` are
                        no queries
    page_table          int32 [slots, pages], lines ``page_table_stride`` apart
    scale               log2(e) / sqrt(DIM)
    BLOCK               KV tokens of one iteration
    WINDOW              the sliding window in tokens; 0 for full attention
    """
    chunk = tl.program_id(2)
    head = tl.program_id(1)
    length = tl.load(lengths + chunk)
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERY_BLOCK
    if at >= length:
        return
    start = tl.load(starts + chunk)
    row_pages = page_table + tl.load(slots + chunk).to(tl.int64) * page_table_stride
    kv_head = head // (HEADS // KV)
    index = at + tl.arange(0, QUERY_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    query_offset = ((tl.load(offsets + chunk) - skipped + index).to(tl.int64) * HEADS + head) * DIM
    used = (index < length)[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + query_offset[:, None] + column[None, :], used, 0.0)
    acc = tl.zeros((QUERY_BLOCK, DIM_BLOCK), tl.float32)
    l_i, m_i = init_online_softmax(QUERY_BLOCK)
    end = start + tl.minimum(at + QUERY_BLOCK, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + at - WINDOW + 1, 0)
    for first in range(begin, end, BLOCK):
        token, seen, offset = paged_kv_offsets(first, end, row_pages, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + offset[None, :] + column[:, None], seen[None, :] & (column < DIM)[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        causal = seen[None, :] & (token[None, :] <= start + index[:, None])
        if WINDOW > 0:
            causal = causal & (token[None, :] > start + index[:, None] - WINDOW)
        weight, alpha, l_i, m_i = online_softmax_update(score, causal, l_i, m_i, 1, WINDOW > 0)
        value = tl.load(
            values + offset[:, None] + column[None, :], seen[:, None] & (column < DIM)[None, :], 0.0
        )
        acc = tl.dot(
            weight.to(query.dtype), value.to(query.dtype), acc * alpha[:, None], input_precision=PRECISION
        )
    tl.store(output + query_offset[:, None] + column[None, :], acc / l_i[:, None], used)


class PrefillAttention:
    """The launch of one step's prefill attention, prepared once and repeated in each layer."""

    def __init__(
        self,
        queries: torch.Tensor,
        pool: LayerKV,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        *,
        max_chunk_len: int,
        skipped: int,
        window: int | None = None,
    ) -> None:
        """Prepare the launch for ``queries`` [T, heads, d] and a ``pool``, and for all layers that are like these.

        ``rows`` int32 [4, chunks] are slots, starts, lengths (at most ``max_chunk_len``) and the offsets of the
        chunks' first tokens in the step, whose first ``skipped`` tokens are not among the queries. ``page_table`` is
        int32 [slots, P]. A token attends to the last ``window`` tokens up to itself, to all of them with None.
        """
        heads, dim = queries.shape[1:]
        exact = queries.dtype == torch.float32
        dim_block = padded_head_dim(dim)
        tuning = tuning_for(queries.device)
        tile = tuning.wide_prefill_tile if exact or dim_block > WIDE_HEAD_DIM else tuning.prefill_tile
        self._tables = *rows.unbind(), page_table
        self._launch = CachedLaunch(
            prefill_attention_kernel,
            (triton.cdiv(max_chunk_len, tile.queries), heads, rows.shape[1]),
            *(skipped, LOG2_E * dim**-0.5, page_table.stride(0)),
            HEADS=heads,
            KV=pool[0].shape[1],
            DIM=dim,
            DIM_BLOCK=dim_block,
            PAGE=page_size,
            QUERY_BLOCK=tile.queries,
            BLOCK=tile.tokens,
            WINDOW=window or 0,
            PRECISION="ieee" if exact else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(self, queries: torch.Tensor, pool: LayerKV, output: torch.Tensor) -> None:
        """Attend with ``queries`` to one layer's ``pool``; write the result, of the same shape, to ``output``."""
        self._launch(queries, *pool, *self._tables, output)
