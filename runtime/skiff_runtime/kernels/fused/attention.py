"""Attention over the paged cache without a plan: what a launch needs stands in device tables, so graphs can hold it.

Decode splits each row's context into parts, whose softmax states are merged after (Dao et al., 2023, "Flash-Decoding").
Nothing here depends on the page size but where K and V are found, so results are the same for any.
"""

from typing import Final

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
PROGRAMS: Final = 2200
"""Decode makes about so many programs, so that long contexts among short ones keep no one waiting."""
FEW_ROWS: Final = 4
"""For which small tiles are the quickest."""
MAX_SPLITS: Final = 64
MIN_SPLIT: Final = 256
"""Tokens of the longest context for which another split pays."""


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["slots"])
def _decode(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    pages: tl.tensor,
    contexts: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    pages_stride: tl.tensor,
    splits: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + row)
    share = tl.cdiv(tl.cdiv(context, splits), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, context)
    table = pages + tl.load(slots + row).to(tl.int64) * pages_stride
    group = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    head = row * (KV * GROUP) + kv_head * GROUP + group
    used = (group < GROUP)[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + head[:, None] * DIM + column[None, :], used, 0.0)
    mixed = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    highest = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
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
    if WHOLE:
        tl.store(output + head[:, None] * DIM + column[None, :], mixed / total[:, None], used)
    else:
        some = begin < end
        mixed = mixed / total[:, None]
        weight = tl.where(some, highest + tl.log2(total), -float("inf"))
        at = head * splits + split
        tl.store(parts + at[:, None] * DIM + column[None, :], mixed, used & some)
        tl.store(weights + at, weight, group < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    parts: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    splits: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    weight = tl.load(weights + head * splits + split, split < splits, -float("inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    inside = (weight > -float("inf"))[:, None] & (column < DIM)[None, :]
    part = tl.load(parts + (head * splits + split[:, None]) * DIM + column[None, :], inside, 0.0)
    mixed = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(output + head * DIM + column, mixed, column < DIM)


def splits_of(rows: int, kv_heads: int, longest: int) -> int:
    """Into how many parts ``decode`` cuts each row: by what is known before the contexts are."""
    wanted = round(PROGRAMS / (rows * kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-longest // MIN_SPLIT)))


def decode(
    queries: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    pages: torch.Tensor,
    contexts: torch.Tensor,
    page_size: int,
    *,
    longest: int,
) -> torch.Tensor:
    """One query a row: [R, heads, d] over the first ``contexts`` int32[R] tokens of ``slots`` [R]; same shape.

    ``pages`` int32[slots, P] is the page table, ``longest`` the most that any context will ever be.
    """
    rows, heads, dim = queries.shape
    kv = pool[0].shape[1]
    splits = splits_of(rows, kv, longest)
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    parts, weights = output, output
    if splits > 1:
        parts = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=queries.device)
        weights = torch.empty((rows, heads, splits), dtype=torch.float32, device=queries.device)
    dim_block = max(16, triton.next_power_of_2(dim))
    _decode[(kv, splits, rows)](
        queries,
        pool[0],
        pool[1],
        slots,
        pages,
        contexts,
        output,
        parts,
        weights,
        LOG2_E * dim**-0.5,
        pages.stride(0),
        splits,
        KV=kv,
        GROUP=heads // kv,
        GROUP_BLOCK=max(16, triton.next_power_of_2(heads // kv)),
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGE=page_size,
        WHOLE=splits == 1,
        **_decode_tiles(queries.dtype, dim_block, splits, rows),
    )
    if splits > 1:
        _merge[(rows * heads,)](
            parts,
            weights,
            output,
            splits,
            DIM=dim,
            DIM_BLOCK=dim_block,
            SPLITS_BLOCK=triton.next_power_of_2(splits),
            num_warps=1,
        )
    return output


def _decode_tiles(dtype: torch.dtype, dim_block: int, splits: int, rows: int) -> dict[str, int | str]:
    """Of the shapes tried on an H200, the fastest; docs/benchmarks.md has the others."""
    if dtype == torch.float32:
        return {"BLOCK": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
    if dim_block > 128:
        return {"BLOCK": 32, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3}
    if rows <= FEW_ROWS:
        return {"BLOCK": 32, "PRECISION": "tf32", "num_warps": 4, "num_stages": 4}
    block = 64 if splits > 4 else 128
    return {"BLOCK": block, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3 if splits == 1 else 2}


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
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    end = start + tl.minimum(at + ROWS, length)
    for first in range(0, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < end
        page = tl.load(table + token // PAGE, seen, 0).to(tl.int64)
        place = (page * PAGE + token % PAGE) * (KV * DIM) + kv_head * DIM
        key = tl.load(keys + place[None, :] + column[:, None], seen[None, :] & (column < DIM)[:, None], 0.0)
        score = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :] & (token[None, :] <= start + index[:, None]), score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(share, 1)
        value = tl.load(
            values + place[:, None] + column[None, :], seen[:, None] & (column < DIM)[None, :], 0.0
        )
        mixed = tl.dot(
            share.to(query.dtype), value.to(query.dtype), mixed * kept[:, None], input_precision=PRECISION
        )
        highest = higher
    tl.store(output + place_of[:, None] + column[None, :], mixed / total[:, None], used)


def prefill(
    queries: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    *,
    longest: int,
    skipped: int,
) -> torch.Tensor:
    """Causal attention of chunks of prompts over all that their slots hold up to themselves; [T, heads, d].

    ``rows`` int32[4, R] are slots, starts, lengths (``longest`` at most) and first tokens; the latter
    count ``skipped`` tokens that are not among ``queries`` [T, heads, d].
    """
    heads, dim = queries.shape[1:]
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    exact = queries.dtype == torch.float32
    dim_block = max(16, triton.next_power_of_2(dim))
    small = exact or dim_block > 128
    block = 32 if small else 128
    _prefill[(triton.cdiv(longest, block), heads, rows.shape[1])](
        queries,
        pool[0],
        pool[1],
        *rows.unbind(),
        pages,
        output,
        skipped,
        LOG2_E * dim**-0.5,
        pages.stride(0),
        HEADS=heads,
        KV=pool[0].shape[1],
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGE=page_size,
        ROWS=block,
        BLOCK=32 if small else 64,
        PRECISION="ieee" if exact else "tf32",
        num_warps=4,
        num_stages=2 if small else 3,
    )
    return output
