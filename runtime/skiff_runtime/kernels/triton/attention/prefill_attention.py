"""Attention of chunks of prompts over the paged cache without a plan: what a launch needs stands in device tables."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.places import paged_kv_offsets
from skiff_runtime.kernels.triton.attention.softmax import LOG2_E, init_online_softmax, online_softmax_update
from skiff_runtime.kernels.triton.attention.tiles import padded_head_dim
from skiff_runtime.kernels.triton.runtime.cached_launch import CachedLaunch, LayerKV


@triton.jit(
    do_not_specialize=["skipped"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths", "offsets"],
)
def _prefill(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    offsets: tl.tensor,
    pages: tl.tensor,
    output: tl.tensor,
    skipped: tl.tensor,
    scale: tl.tensor,
    pages_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    chunk = tl.program_id(2)
    head = tl.program_id(1)
    length = tl.load(lengths + chunk)
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if at >= length:
        return
    start = tl.load(starts + chunk)
    table = pages + tl.load(slots + chunk).to(tl.int64) * pages_stride
    kv_head = head // (HEADS // KV)
    index = at + tl.arange(0, ROWS)
    column = tl.arange(0, DIM_BLOCK)
    place_of = ((tl.load(offsets + chunk) - skipped + index).to(tl.int64) * HEADS + head) * DIM
    used = (index < length)[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + place_of[:, None] + column[None, :], used, 0.0)
    mixed = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    total, highest = init_online_softmax(ROWS)
    end = start + tl.minimum(at + ROWS, length)
    for first in range(0, end, BLOCK):
        token, seen, place = paged_kv_offsets(first, end, table, kv_head, KV, DIM, PAGE, BLOCK)
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & (column < DIM)[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        past = seen[None, :] & (token[None, :] <= start + index[:, None])
        share, kept, total, highest = online_softmax_update(score, past, total, highest, 1)
        value = tl.load(
            values + place[:, None] + column[None, :], seen[:, None] & (column < DIM)[None, :], 0.0
        )
        mixed = tl.dot(
            share.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision=PRECISION
        )
    tl.store(output + place_of[:, None] + column[None, :], mixed / total[:, None], used)


class Prefill:
    """Causal attention of chunks of prompts over all that their slots hold up to themselves.

    What a step launches in each of its layers is found out once.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        pool: LayerKV,
        rows: torch.Tensor,
        pages: torch.Tensor,
        page_size: int,
        *,
        longest: int,
        skipped: int,
    ) -> None:
        """For ``queries`` [T, heads, d] and a ``pool`` of one layer, and such as are like them.

        ``rows`` int32[4, R] are slots, starts, lengths (``longest`` at most) and first tokens; the latter count ``skipped``
        tokens that are not among the queries. ``pages`` int32[slots, P] is the page table.
        """
        heads, dim = queries.shape[1:]
        exact = queries.dtype == torch.float32
        dims = padded_head_dim(dim)
        small = exact or dims > 128
        block = 32 if small else 128
        self._tables = *rows.unbind(), pages
        self._launch = CachedLaunch(
            _prefill,
            (triton.cdiv(longest, block), heads, rows.shape[1]),
            *(skipped, LOG2_E * dim**-0.5, pages.stride(0)),
            HEADS=heads,
            KV=pool[0].shape[1],
            DIM=dim,
            DIM_BLOCK=dims,
            PAGE=page_size,
            ROWS=block,
            BLOCK=32 if small else 64,
            PRECISION="ieee" if exact else "tf32",
            num_warps=4,
            num_stages=2 if small else 3,
        )

    def __call__(self, queries: torch.Tensor, pool: LayerKV, output: torch.Tensor) -> None:
        """Attend with ``queries`` in a layer whose K and V are ``pool``; ``output`` has the shape of the former."""
        self._launch(queries, *pool, *self._tables, output)
