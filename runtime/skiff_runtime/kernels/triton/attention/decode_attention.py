"""Decode attention: one query token a row over the paged KV cache, without a plan made on the host.

The problem: few rows leave most of a GPU idle if each program reads a whole context, and a launch that is captured in
a CUDA graph cannot depend on the lengths of contexts. The idea (Flash-Decoding, Dao et al., 2023): every row's
context is cut into the same number of splits, chosen from what is known at capture; each program computes the softmax
state of one split and ``merge_splits_kernel`` merges them. All that depends on a row (length, page table, shared
prefix) is read from tables on the device.

Rows of a group that share a prefix read it once, as additional splits of each of its rows (cascade attention:
Hydragen, Juravsky et al., 2024; FlashInfer): ``shared_prefix_attention_kernel`` computes them for up to
``max_group_rows`` rows at a time.

Invariant: the page size changes only where K and V are found, so results are the same, to the bit, for any.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, max_prefix_splits
from skiff_runtime.kernels.triton.attention.attention_loop import (
    FEW_QUERIES,
    LOG2_E,
    attention_loop,
    padded_head_dim,
)
from skiff_runtime.kernels.triton.fp8.dequantize import supports_fp8_ptx
from skiff_runtime.kernels.triton.runtime.cached_launch import CachedLaunch, LayerKV
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import WIDE_HEAD_DIM, AttentionTile, DecodeAttentionTuning, tuning_for

EXACT_TILE: Final = AttentionTile(tokens=32, warps=4, stages=2)
WIDE_EXACT_TILE: Final = AttentionTile(tokens=16, warps=4, stages=1)
"""For float32, of a size that fits GPUs with little shared memory."""


@triton.jit(
    do_not_specialize=["splits", "max_splits"], do_not_specialize_on_alignment=["slots", "prefix_lens"]
)
def decode_attention_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    output: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    page_table_stride: tl.tensor,
    splits: tl.tensor,
    max_splits: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
    EARLY_TABLES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one split of one row's attention over the tokens that no shared-prefix group covers.

    With a sliding window, the splits divide the last WINDOW tokens of the row, and no others are read.

    Grid: (KV heads, splits, rows). Each program serves the GROUP query heads of one KV head.

    queries             [rows, KV * GROUP, DIM]
    keys, values        [tokens of the pool, KV, DIM], in the type of the queries or in FP8
    slots               int32 [rows]: the row's line of the page table
    page_table          int32 [slots, pages], lines ``page_table_stride`` apart
    seq_lens            int32 [rows]: the tokens that the row attends to
    prefix_lens         int32 [rows]: the first tokens, which the row's group reads; only with HAS_PREFIXES
    output              [rows, KV * GROUP, DIM]: written with SINGLE_SPLIT
    partials            float32 [rows, KV * GROUP, max_splits, DIM]: written otherwise, normalized by their own weights
    lse                 float32 [rows, KV * GROUP, max_splits]: their log-sum-exp to base 2, -inf for an empty split
    scale               log2(e) / sqrt(DIM)
    splits              the splits of a row, without those of its prefix; ``max_splits`` counts both
    GROUP_BLOCK, DIM_BLOCK  GROUP and DIM rounded up to what a tile holds
    WINDOW              the sliding window in tokens, not with HAS_PREFIXES; 0 for full attention
    EARLY_TABLES        load slots, page_table and seq_lens before the kernel ahead has ended
    BLOCK, PRECISION, USE_PTX  as ``attention_loop`` takes them
    """
    launch_dependents(PDL)
    if not EARLY_TABLES:
        wait_for_dependencies(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first = tl.load(prefix_lens + row) if HAS_PREFIXES else 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    # Whole blocks for each split, so that only the last one computes for padding.
    split_len = tl.cdiv(tl.cdiv(seq_len - first, splits), BLOCK) * BLOCK
    begin = first + split * split_len
    end = tl.minimum(begin + split_len, seq_len)
    row_pages = page_table + tl.load(slots + row).to(tl.int64) * page_table_stride
    if EARLY_TABLES:
        tokens = begin + tl.arange(0, BLOCK)
        touched = tl.load(row_pages + tokens // PAGE, tokens < end, 0)
        if PDL:  # a use that the compiler does not remove: the loop finds these pages in the cache
            tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [touched], dtype=tl.int32, is_pure=False, pack=1
            )
        wait_for_dependencies(PDL)
    group = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    head = row * (KV * GROUP) + kv_head * GROUP + group
    used = (group < GROUP)[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + head[:, None] * DIM + column[None, :], used, 0.0)
    acc, l_i, m_i = attention_loop(
        query, keys, values, row_pages, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION, USE_PTX
    )
    if SINGLE_SPLIT:
        tl.store(output + head[:, None] * DIM + column[None, :], acc / l_i[:, None], used)
    else:
        # Empty splits of short rows divide zero by zero; their partials stay unwritten and their weight is zero.
        not_empty = begin < end
        acc = acc / l_i[:, None]
        split_lse = tl.where(not_empty, m_i + tl.log2(l_i), -float("inf"))
        at = head * max_splits + split
        tl.store(partials + at[:, None] * DIM + column[None, :], acc, used & not_empty)
        tl.store(lse + at, split_lse, group < GROUP)


@triton.jit(
    do_not_specialize=["splits", "max_splits", "num_items"],
    do_not_specialize_on_alignment=["slots", "row_order", "work_items"],
)
def shared_prefix_attention_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    page_table: tl.tensor,
    row_order: tl.tensor,
    work_items: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    page_table_stride: tl.tensor,
    splits: tl.tensor,
    max_splits: tl.tensor,
    num_items: tl.tensor,
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
    """Compute one split of a shared prefix for all rows of one work item.

    Grid: (KV heads, num_items). A program takes the queries of all its rows for one KV head as one tile, of FEW query
    heads where they fit and of MANY otherwise, and reads K and V once for all of them. Programs of unused work items
    return at once.

    row_order           int32 [rows]: row numbers, group by group
    work_items          int32 [5, num_items], see ``SharedPrefixes``; the page table line is that of the item's first
                        row
    partials, lse       as in ``decode_attention_kernel``; split s of a prefix is written to place ``splits + s`` of
                        each row

    The other arguments are those of ``decode_attention_kernel``.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    item = work_items + tl.program_id(1)
    count = tl.load(item)
    if count == 0:
        return
    rows = row_order + tl.load(item + num_items)
    begin = tl.load(item + 2 * num_items)
    end = tl.load(item + 3 * num_items)
    split = splits + tl.load(item + 4 * num_items)
    row_pages = page_table + tl.load(slots + tl.load(rows)).to(tl.int64) * page_table_stride
    if count * GROUP <= FEW:
        _attend_to_prefix(
            *(
                queries,
                keys,
                values,
                row_pages,
                rows,
                count,
                begin,
                end,
                partials,
                lse,
                scale,
                max_splits,
                split,
            ),
            *(KV, GROUP, FEW, DIM, DIM_BLOCK, PAGE, BLOCK, PRECISION, USE_PTX),
        )
    else:
        _attend_to_prefix(
            *(
                queries,
                keys,
                values,
                row_pages,
                rows,
                count,
                begin,
                end,
                partials,
                lse,
                scale,
                max_splits,
                split,
            ),
            *(KV, GROUP, MANY, DIM, DIM_BLOCK, PAGE, BLOCK, PRECISION, USE_PTX),
        )


@triton.jit
def _attend_to_prefix(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    row_pages: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    max_splits: tl.tensor,
    split: tl.tensor,
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
    """Attend with the heads of ``count`` rows, at most HEADS of one KV head, from ``begin`` to ``end``."""
    kv_head = tl.program_id(0)
    lane = tl.arange(0, HEADS)
    column = tl.arange(0, DIM_BLOCK)
    in_item = lane < count * GROUP
    row = tl.load(rows + lane // GROUP, in_item, 0).to(tl.int64)
    head = row * (KV * GROUP) + kv_head * GROUP + lane % GROUP
    used = in_item[:, None] & (column < DIM)[None, :]
    query = tl.load(queries + head[:, None] * DIM + column[None, :], used, 0.0)
    acc, l_i, m_i = attention_loop(
        query, keys, values, row_pages, begin, end, kv_head, scale, KV, DIM, PAGE, BLOCK, PRECISION, USE_PTX
    )
    at = head * max_splits + split
    tl.store(partials + at[:, None] * DIM + column[None, :], acc / l_i[:, None], used)
    tl.store(lse + at, m_i + tl.log2(l_i), in_item)


@triton.jit(do_not_specialize=["splits", "max_splits"], do_not_specialize_on_alignment=["prefix_splits"])
def merge_splits_kernel(
    partials: tl.tensor,
    lse: tl.tensor,
    prefix_splits: tl.tensor,
    output: tl.tensor,
    splits: tl.tensor,
    max_splits: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the splits of one query head of one row, weighted by their log-sum-exps.

    Grid: (rows * HEADS), one warp each.

    partials            float32 [rows, HEADS, max_splits, DIM]
    lse                 float32 [rows, HEADS, max_splits], to base 2
    prefix_splits       int32 [rows]: the splits of the row's shared prefix, behind its own; only with HAS_PREFIXES
    output              [rows, HEADS, DIM], in the type of the model
    SPLITS_BLOCK        ``max_splits`` rounded up to a power of two
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    count = splits
    if HAS_PREFIXES:
        count += tl.load(prefix_splits + head // HEADS)
    split_lse = tl.load(lse + head * max_splits + split, split < count, -float("inf"))
    weight = tl.exp2(split_lse - tl.max(split_lse, 0))
    used = (split_lse > -float("inf"))[:, None] & (column < DIM)[None, :]
    partial = tl.load(partials + (head * max_splits + split[:, None]) * DIM + column[None, :], used, 0.0)
    merged = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(output + head * DIM + column, merged, column < DIM)


def choose_num_splits(rows: int, kv_heads: int, max_seq_len: int, tuning: DecodeAttentionTuning) -> int:
    """Return the splits of each row of a launch: enough for ``target_programs``, from what is known at capture."""
    wanted = round(tuning.target_programs / (rows * kv_heads))
    return max(1, min(wanted, tuning.max_splits, -(-max_seq_len // tuning.min_split_tokens)))


def find_row_counts_by_variant(
    device: torch.device,
    limit: int,
    kv_heads: int,
    max_seq_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    *,
    shared: bool = False,
) -> list[int]:
    """Return the least number of rows, of up to ``limit``, for each set of compiled kernels that steps launch.

    For ahead-of-time compilation: to launch these steps compiles every variant. ``shared``: with shared prefixes.
    ``max_seq_len`` is the most tokens that a row reads, so at most the sliding window of the layers in question.
    """
    tuning = tuning_for(device).decode_attention
    found: dict[tuple[Any, ...], int] = {}
    for rows in range(2 if shared else 1, limit + 1):
        splits = choose_num_splits(rows, kv_heads, max_seq_len, tuning)
        tile = _decode_tile(dtype, kv_dtype, padded_head_dim(dim), splits, rows, tuning)
        max_splits = splits + max_prefix_splits(rows) if shared else splits
        found.setdefault((triton.next_power_of_2(max_splits), *tile.values()), rows)
    return list(found.values())


def max_group_rows(device: torch.device, heads: int, kv_heads: int) -> int:
    """Return how many rows read a shared prefix together, at most."""
    return max(1, tuning_for(device).decode_attention.max_group_heads // (heads // kv_heads))


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R rows over the paged KV cache.

    Row i attends to the first ``seq_lens[i]`` tokens of ``slots[i]``, both int32 [R]. ``page_table`` int32 [slots, P]
    has each slot's pages, of ``page_size`` tokens.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int


class DecodeAttention:
    """The launches of one step's decode attention, prepared once and repeated in each layer."""

    def __init__(
        self,
        queries: torch.Tensor,
        pool: LayerKV,
        decode_rows: DecodeRows,
        *,
        max_seq_len: int,
        shared: SharedPrefixes | None = None,
        window: int | None = None,
        early_tables: bool = False,
    ) -> None:
        """Prepare launches for ``queries`` [R, heads, d] and a ``pool``, and for all layers that are like these.

        ``max_seq_len`` is the length that no context will ever exceed. A shared prefix is shorter than the contexts
        of its rows. With a ``window``, a row attends to its last ``window`` tokens only; prefixes cannot be shared
        then, because the windows of a group's rows begin at different tokens.

        ``early_tables``: the kernel ahead of each launch does not write the tables of ``decode_rows``, and lets its
        dependents start behind its own wait, so that those which do have ended.
        """
        assert window is None or shared is None
        assert not early_tables or shared is None, "the kernel ahead is that of the shared prefixes"
        seq_lens, page_table = decode_rows.seq_lens, decode_rows.page_table
        (rows, heads, dim), kv = queries.shape, pool[0].shape[1]
        tuning = tuning_for(queries.device).decode_attention
        dim_block, group = padded_head_dim(dim), heads // kv
        longest = max_seq_len if window is None else min(max_seq_len, window)
        splits = choose_num_splits(rows, kv, longest, tuning)
        max_splits = splits if shared is None else splits + shared.max_splits
        self._shared = shared
        self._tables = decode_rows.slots, page_table
        # Without shared prefixes the kernels never read these arguments; any int32 tensor stands in for them.
        self._rows = seq_lens, seq_lens if shared is None else shared.prefix_lens
        numbers = LOG2_E * dim**-0.5, page_table.stride(0), splits, max_splits
        pdl = pdl_options(queries.device)
        sizes: dict[str, Any] = {
            "KV": kv,
            "GROUP": group,
            "DIM": dim,
            "DIM_BLOCK": dim_block,
            "PAGE": decode_rows.page_size,
        }
        sizes["USE_PTX"] = supports_fp8_ptx(queries.device)
        if shared is not None:
            num_items = shared.work_items.shape[1]
            self._attend_to_prefixes = CachedLaunch(
                shared_prefix_attention_kernel,
                (kv, num_items, 1),
                *(*numbers, num_items),
                FEW=max(tuning.few_group_heads, triton.next_power_of_2(group)),
                MANY=max(tuning.max_group_heads, triton.next_power_of_2(group)),
                **sizes,
                **_prefix_tile(queries.dtype, dim_block, tuning),
                **pdl,
            )
        self._attend_to_rows = CachedLaunch(
            decode_attention_kernel,
            (kv, splits, rows),
            *numbers,
            GROUP_BLOCK=max(FEW_QUERIES.value, triton.next_power_of_2(group)),
            SINGLE_SPLIT=max_splits == 1,
            HAS_PREFIXES=shared is not None,
            WINDOW=window or 0,
            EARLY_TABLES=early_tables,
            **sizes,
            **_decode_tile(queries.dtype, pool[0].dtype, dim_block, splits, rows, tuning),
            **pdl,
        )
        self._merge = SplitMerge(
            (rows, heads, dim),
            splits,
            max_splits,
            seq_lens if shared is None else shared.prefix_splits,
            has_prefixes=shared is not None,
        )

    def __call__(self, queries: torch.Tensor, pool: LayerKV, output: torch.Tensor) -> None:
        """Attend with ``queries`` to one layer's ``pool``; write the result, of the same shape, to ``output``."""
        partials, lse = self._merge.empty_partials(output)
        shared = self._shared
        if shared is not None:
            self._attend_to_prefixes(
                queries, *pool, *self._tables, shared.row_order, shared.work_items, partials, lse
            )
        self._attend_to_rows(queries, *pool, *self._tables, *self._rows, output, partials, lse)
        self._merge(partials, lse, output)


class SplitMerge:
    """The partials of a step's rows, one for each split, and the launch that merges them; nothing with a single split."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        splits: int,
        max_splits: int,
        prefix_splits: torch.Tensor,
        *,
        has_prefixes: bool = False,
    ) -> None:
        """``shape`` is (R, heads, d); the others are as ``merge_splits_kernel`` takes them."""
        rows, heads, dim = shape
        self._shape = rows, heads, max_splits, dim
        self._prefix_splits = prefix_splits
        self._launch = None
        if max_splits > 1:
            self._launch = CachedLaunch(
                merge_splits_kernel,
                (rows * heads, 1, 1),
                *(splits, max_splits),
                HEADS=heads,
                DIM=dim,
                DIM_BLOCK=padded_head_dim(dim),
                SPLITS_BLOCK=triton.next_power_of_2(max_splits),
                HAS_PREFIXES=has_prefixes,
                num_warps=1,
                **pdl_options(prefix_splits.device),
            )

    def empty_partials(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return partials and log-sum-exps as ``merge_splits_kernel`` reads them, or ``output`` for both if none are used."""
        if self._launch is None:
            return output, output
        partials = torch.empty(self._shape, dtype=torch.float32, device=output.device)
        return partials, torch.empty(self._shape[:-1], dtype=torch.float32, device=output.device)

    def __call__(self, partials: torch.Tensor, lse: torch.Tensor, output: torch.Tensor) -> None:
        """Merge the splits into ``output`` [R, heads, d]."""
        if self._launch is not None:
            self._launch(partials, lse, self._prefix_splits, output)


def tile_options(dtype: torch.dtype, dim_block: int, tile: AttentionTile) -> dict[str, Any]:
    """Return a tile as launch options; in float32 another one, with exact products, takes its place."""
    precision = "tf32"
    if dtype == torch.float32:
        tile = WIDE_EXACT_TILE if dim_block > WIDE_HEAD_DIM else EXACT_TILE
        precision = "ieee"
    return {"BLOCK": tile.tokens, "PRECISION": precision, "num_warps": tile.warps, "num_stages": tile.stages}


def _decode_tile(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim_block: int,
    splits: int,
    rows: int,
    tuning: DecodeAttentionTuning,
) -> dict[str, Any]:
    """Return the tile of ``decode_attention_kernel``, as launch options."""
    tile = tuning.fp8_latency_tile if kv_dtype == E4M3 else tuning.latency_tile
    if dim_block > WIDE_HEAD_DIM:
        tile = tuning.wide_tile
    elif rows > tuning.few_rows and splits <= tuning.few_splits:
        tile = tuning.throughput_tile
    return tile_options(dtype, dim_block, tile)


def _prefix_tile(dtype: torch.dtype, dim_block: int, tuning: DecodeAttentionTuning) -> dict[str, Any]:
    """Return the tile of ``shared_prefix_attention_kernel``, as launch options."""
    tile = tuning.wide_prefix_tile if dim_block > WIDE_HEAD_DIM else tuning.prefix_tile
    return tile_options(dtype, dim_block, tile)
