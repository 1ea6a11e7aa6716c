"""Kernels for attention of one token a row over the paged cache without a plan: all that depends on a row stands in
device tables, so graphs can hold their launches.

Each row's context is cut into parts, whose softmax states are merged after (Dao et al., 2023, "Flash-Decoding").
Nothing here depends on the page size but where K and V are found, so results are the same for any. What groups of rows
have in common is read once for the group, as parts of each of its rows (as in Juravsky et al., 2024, "Hydragen").
"""

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.attention.attend import attend
from skiff_runtime.kernels.triton.runtime.dependent_launch import launch_dependents, wait_for_dependencies


@triton.jit(do_not_specialize=["splits", "places"], do_not_specialize_on_alignment=["slots", "skipped"])
def decode_rows(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    pages: tl.tensor,
    contexts: tl.tensor,
    skipped: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    pages_stride: tl.tensor,
    splits: tl.tensor,
    places: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One part of a row, of what no group reads for it."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + row)
    skip = tl.load(skipped + row) if SKIPS else 0
    share = tl.cdiv(tl.cdiv(context - skip, splits), BLOCK) * BLOCK
    begin = skip + split * share
    end = tl.minimum(begin + share, context)
    table = pages + tl.load(slots + row).to(tl.int64) * pages_stride
    group = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    head = row * (KV * GROUP) + kv_head * GROUP + group
    used = (group < GROUP)[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + head[:, None] * DIM + column[None, :], used, 0.0)
    mixed, total, highest = attend(
        query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION, USE_PTX
    )
    if WHOLE:
        tl.store(output + head[:, None] * DIM + column[None, :], mixed / total[:, None], used)
    else:
        some = begin < end
        mixed = mixed / total[:, None]
        weight = tl.where(some, highest + tl.log2(total), -float("inf"))
        at = head * places + split
        tl.store(parts + at[:, None] * DIM + column[None, :], mixed, used & some)
        tl.store(weights + at, weight, group < GROUP)


@triton.jit(
    do_not_specialize=["splits", "places", "room"],
    do_not_specialize_on_alignment=["slots", "order", "items"],
)
def shared_prefix_attention_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    pages: tl.tensor,
    order: tl.tensor,
    items: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    pages_stride: tl.tensor,
    splits: tl.tensor,
    places: tl.tensor,
    room: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of what some rows have in common, for all of them at once, in a tile that is not much too large."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    item = items + tl.program_id(1)
    count = tl.load(item)
    if count == 0:
        return
    rows = order + tl.load(item + room)
    begin = tl.load(item + 2 * room)
    end = tl.load(item + 3 * room)
    place = splits + tl.load(item + 4 * room)
    table = pages + tl.load(slots + tl.load(rows)).to(tl.int64) * pages_stride
    if count * GROUP <= FEW:
        _read_prefix(
            *(queries, keys, values, table, rows, count, begin, end, parts, weights, scale, places, place),
            *(KV, GROUP, FEW, DIM, DIM_BLOCK, PAGE, BLOCK, PRECISION, USE_PTX),
        )
    else:
        _read_prefix(
            *(queries, keys, values, table, rows, count, begin, end, parts, weights, scale, places, place),
            *(KV, GROUP, MANY, DIM, DIM_BLOCK, PAGE, BLOCK, PRECISION, USE_PTX),
        )


@triton.jit
def _read_prefix(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    places: tl.tensor,
    place: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
) -> None:
    """The same, when ``HEADS`` query heads are enough for one KV head of ``count`` rows."""
    kv_head = tl.program_id(0)
    lane = tl.arange(0, HEADS)
    column = tl.arange(0, DIM_BLOCK)
    inside = lane < count * GROUP
    row = tl.load(rows + lane // GROUP, inside, 0).to(tl.int64)
    head = row * (KV * GROUP) + kv_head * GROUP + lane % GROUP
    used = inside[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + head[:, None] * DIM + column[None, :], used, 0.0)
    mixed, total, highest = attend(
        query, keys, values, table, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION, USE_PTX
    )
    at = head * places + place
    tl.store(parts + at[:, None] * DIM + column[None, :], mixed / total[:, None], used)
    tl.store(weights + at, highest + tl.log2(total), inside)


@triton.jit(do_not_specialize=["splits", "places"], do_not_specialize_on_alignment=["held"])
def merge_splits_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    held: tl.tensor,
    output: tl.tensor,
    splits: tl.tensor,
    places: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SKIPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    count = splits
    if SKIPS:
        count += tl.load(held + head // HEADS)
    weight = tl.load(weights + head * places + split, split < count, -float("inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    inside = (weight > -float("inf"))[:, None] & (column < DIM)[None, :]
    part = tl.load(parts + (head * places + split[:, None]) * DIM + column[None, :], inside, 0.0)
    mixed = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(output + head * DIM + column, mixed, column < DIM)
