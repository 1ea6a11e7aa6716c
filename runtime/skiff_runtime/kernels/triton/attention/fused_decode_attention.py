"""Decode attention of few rows in one launch with QK norm, RoPE and the store of K and V.

At batch 1 a launch that reads next to nothing costs 1.5 to 2.5 µs a layer, and attention, whose contexts are short, waits
for memory about as long. Here each program normalizes and rotates the query heads that it needs itself, and loads K and V
of its first block of tokens while the QKV product ahead is still running: all of them are in the cache but for the newest
token, which that product computes. The program whose split ends with the newest token takes its K and V from the product,
begins its softmax state with them, and stores them.

Invariant: the tables of the step and the K and V of earlier tokens are written before the step's embedding, which is
launched without programmatic dependent launch and so waits for all that is ahead of it. Every kernel behind it can read
them before its own wait.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.kernels.triton.attention.attention_loop import (
    FEW_QUERIES,
    LOG2_E,
    online_softmax_update,
    padded_head_dim,
    paged_kv_offsets,
)
from skiff_runtime.kernels.triton.attention.decode_attention import (
    DecodeRows,
    SplitMerge,
    choose_num_splits,
    tile_options,
)
from skiff_runtime.kernels.triton.attention.qk_norm_rope import normalize_and_rotate
from skiff_runtime.kernels.triton.runtime.cached_launch import CachedLaunch, LayerKV
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import WIDE_HEAD_DIM, tuning_for


@triton.jit(
    do_not_specialize=["splits", "max_splits"], do_not_specialize_on_alignment=["slots", "slot_mapping"]
)
def fused_decode_attention_kernel(
    qkv: tl.tensor,
    norm_weights: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cos_sin: tl.tensor,
    slot_mapping: tl.tensor,
    slots: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    output: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    page_table_stride: tl.tensor,
    splits: tl.tensor,
    max_splits: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one split of one row's attention, from the row's QKV product.

    Grid: (KV heads, splits, rows). Each program serves the GROUP query heads of one KV head. Splits and the arguments
    that are not listed here are those of ``decode_attention_kernel``.

    qkv                 [rows, (KV * GROUP + 2 * KV) * DIM], rows ``qkv_stride`` apart: query heads, then keys, then values
    norm_weights        [2, DIM]: of queries and of keys; not read without NORM
    keys, values        [tokens of the pool, KV, DIM], in the type of qkv: those of the newest token are written
    cos_sin             [positions, 2, DIM], as ``qk_norm_rope_store_kv_kernel`` takes it
    slot_mapping        int64 [rows]: the newest token's place in the pool; K and V of a row with -1 (padding) go nowhere
    eps                 float, of the norm
    DIM_BLOCK, HALF_BLOCK  DIM and DIM / 2 rounded up to what the tensor cores multiply
    """
    launch_dependents(PDL)
    EARLY: tl.constexpr = ".cg"
    HALF: tl.constexpr = DIM // 2
    dtype = output.dtype.element_ty
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # From L2: without a wait, a line of an earlier step may still be in L1.
    seq_len = tl.load(seq_lens + row, cache_modifier=EARLY)
    slot = tl.load(slots + row, cache_modifier=EARLY).to(tl.int64)
    location = tl.load(slot_mapping + row, cache_modifier=EARLY).to(tl.int64)
    newest = seq_len - 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    split_len = tl.cdiv(tl.cdiv(seq_len - first, splits), BLOCK) * BLOCK
    begin = first + split * split_len
    has_newest = (begin <= newest) & (newest < begin + split_len)
    end = tl.minimum(begin + split_len, newest)  # of the tokens whose K and V are in the cache
    row_pages = page_table + slot * page_table_stride
    column = tl.arange(0, DIM_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    in_head, in_half = column < DIM, half < HALF
    _, seen, offset = paged_kv_offsets(begin, end, row_pages, kv_head, KV, DIM, PAGE, BLOCK, EARLY)
    key_low, key_high = _load_keys(
        keys + offset[:, None] + half[None, :], seen[:, None] & in_half[None, :], HALF, EARLY
    )
    value_mask = seen[None, :] & in_head[:, None]
    value = tl.load(values + offset[None, :] + column[:, None], value_mask, 0.0, cache_modifier=EARLY)
    angle = cos_sin + newest.to(tl.int64) * (2 * DIM) + half
    cosine = tl.load(angle, in_half, 0.0).to(tl.float32)[None, :]
    sine = tl.load(angle + DIM + HALF, in_half, 0.0).to(tl.float32)[None, :]
    query_low_weight, query_high_weight, key_low_weight, key_high_weight = 1.0, 1.0, 1.0, 1.0
    if NORM:
        query_low_weight = tl.load(norm_weights + half, in_half, 0.0).to(tl.float32)[None, :]
        query_high_weight = tl.load(norm_weights + HALF + half, in_half, 0.0).to(tl.float32)[None, :]
        key_low_weight = tl.load(norm_weights + DIM + half, in_half, 0.0).to(tl.float32)[None, :]
        key_high_weight = tl.load(norm_weights + DIM + HALF + half, in_half, 0.0).to(tl.float32)[None, :]
    wait_for_dependencies(PDL)

    group = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + group
    source = qkv + row * qkv_stride + head[:, None] * DIM + half[None, :]
    used = (group < GROUP)[:, None] & in_half[None, :]
    low = tl.load(source, used, 0.0).to(tl.float32)
    high = tl.load(source + HALF, used, 0.0).to(tl.float32)
    key_source = qkv + row * qkv_stride + (KV * GROUP + kv_head) * DIM
    new_low = tl.load(key_source + half, in_half, 0.0).to(tl.float32)[None, :]
    new_high = tl.load(key_source + HALF + half, in_half, 0.0).to(tl.float32)[None, :]
    new_value = tl.load(key_source + KV * DIM + column, in_head, 0.0)
    low, high = normalize_and_rotate(
        low, high, query_low_weight, query_high_weight, cosine, sine, eps, DIM, NORM, dtype
    )
    new_low, new_high = normalize_and_rotate(
        new_low, new_high, key_low_weight, key_high_weight, cosine, sine, eps, DIM, NORM, dtype
    )
    low, high, new_low, new_high = low.to(dtype), high.to(dtype), new_low.to(dtype), new_high.to(dtype)
    is_stored = has_newest & (location >= 0)
    target = location * (KV * DIM) + kv_head * DIM
    tl.store(keys + target + half[None, :], new_low, is_stored & in_half[None, :])
    tl.store(keys + target + HALF + half[None, :], new_high, is_stored & in_half[None, :])
    tl.store(values + target + column, new_value, is_stored & in_head)

    # The softmax state behind the newest token alone, or before any.
    products = low.to(tl.float32) * new_low.to(tl.float32) + high.to(tl.float32) * new_high.to(tl.float32)
    m_i = tl.where(has_newest, tl.sum(products, 1) * scale, -float("inf"))
    l_i = tl.where(has_newest, tl.full((GROUP_BLOCK,), 1.0, tl.float32), 0.0)
    acc = tl.zeros((DIM_BLOCK, GROUP_BLOCK), tl.float32)
    acc += tl.where(has_newest, new_value.to(tl.float32), 0.0)[:, None]
    low, high = tl.trans(low), tl.trans(high)
    acc, l_i, m_i = _attend(key_low, key_high, value, seen, low, high, acc, l_i, m_i, scale, PRECISION)
    for start in range(begin + BLOCK, end, BLOCK):
        _, seen, offset = paged_kv_offsets(start, end, row_pages, kv_head, KV, DIM, PAGE, BLOCK)
        key_low, key_high = _load_keys(
            keys + offset[:, None] + half[None, :], seen[:, None] & in_half[None, :], HALF, ""
        )
        value = tl.load(values + offset[None, :] + column[:, None], seen[None, :] & in_head[:, None], 0.0)
        acc, l_i, m_i = _attend(key_low, key_high, value, seen, low, high, acc, l_i, m_i, scale, PRECISION)

    acc = tl.trans(acc) / l_i[:, None]
    at = row * (KV * GROUP) + head
    is_result = (group < GROUP)[:, None] & in_head[None, :]
    if SINGLE_SPLIT:
        tl.store(output + at[:, None] * DIM + column[None, :], acc, is_result)
    else:
        # An empty split has the weight zero, and its partials are not read. To end it early is slower: the loads of all
        # other splits would wait for the branch.
        at = at * max_splits + split
        not_empty = begin < seq_len
        tl.store(partials + at[:, None] * DIM + column[None, :], acc, is_result & not_empty)
        tl.store(lse + at, tl.where(not_empty, m_i + tl.log2(l_i), -float("inf")), group < GROUP)


@triton.jit
def _load_keys(
    pointers: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, CACHE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of a block's keys, each [BLOCK, HALF_BLOCK]."""
    low = tl.load(pointers, mask, 0.0, cache_modifier=CACHE)
    return low, tl.load(pointers + HALF, mask, 0.0, cache_modifier=CACHE)


@triton.jit
def _attend(
    key_low: tl.tensor,
    key_high: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    query_low: tl.tensor,
    query_high: tl.tensor,
    acc: tl.tensor,
    l_i: tl.tensor,
    m_i: tl.tensor,
    scale: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take a block of tokens into the softmax state (``attention_loop``), whose sum is transposed; return the state.

    key_low, key_high   [BLOCK, HALF_BLOCK]; query_low, query_high [HALF_BLOCK, Q]
    value               [DIM_BLOCK, BLOCK]
    acc                 [DIM_BLOCK, Q]
    """
    score = tl.dot(key_low, query_low, input_precision=PRECISION)
    score = tl.dot(key_high, query_high, score, input_precision=PRECISION) * scale
    weight, alpha, l_i, m_i = online_softmax_update(score, seen[:, None], l_i, m_i, 0)
    acc = tl.dot(value, weight.to(value.dtype), acc * alpha[None, :], input_precision=PRECISION)
    return acc, l_i, m_i


def supports(qkv: torch.Tensor, pool: LayerKV) -> bool:
    """Return whether ``FusedDecodeAttention`` takes qkv [R, (heads + 2 * kv_heads) * d] and a pool."""
    kv, dim = pool[0].shape[1:]
    group = qkv.shape[1] // (kv * dim) - 2
    return group <= FEW_QUERIES.value and padded_head_dim(dim) <= WIDE_HEAD_DIM and pool[0].dtype == qkv.dtype


def is_fusion_profitable(qkv: torch.Tensor, pool: LayerKV) -> bool:
    """Return whether ``FusedDecodeAttention`` is faster for these rows than a launch of QK norm and RoPE ahead of attention."""
    return len(qkv) <= tuning_for(qkv.device).decode_attention.max_fused_rows and supports(qkv, pool)


class FusedDecodeAttention:
    """The launches of one step's decode attention, QK norm and RoPE, prepared once and repeated in each layer."""

    def __init__(
        self,
        qkv: torch.Tensor,
        pool: LayerKV,
        decode_rows: DecodeRows,
        rope: RopeInputs,
        norm_eps: float | None,
        *,
        max_seq_len: int,
        window: int | None = None,
    ) -> None:
        """Prepare launches for ``qkv`` [R, (heads + 2 * kv_heads) * d] and a ``pool``, and for all layers like these.

        ``rope``, the same in all these layers, has one token for each row, the last of its ``seq_lens`` tokens.
        ``norm_eps`` is that of QK norm, None for models without. Everything else is as ``DecodeAttention`` takes it.
        """
        (kv, dim), rows = pool[0].shape[1:], len(qkv)
        group = qkv.shape[1] // (kv * dim) - 2
        tuning = tuning_for(qkv.device).decode_attention
        longest = max_seq_len if window is None else min(max_seq_len, window)
        splits = choose_num_splits(rows, kv, longest, tuning)
        self._shape = rows, kv * group, dim
        self._tables = (
            rope.cos_sin,
            rope.slot_mapping,
            decode_rows.slots,
            decode_rows.page_table,
            decode_rows.seq_lens,
        )
        self._merge = SplitMerge(self._shape, splits, splits, decode_rows.seq_lens)
        self._attend = CachedLaunch(
            fused_decode_attention_kernel,
            (kv, splits, rows),
            *(LOG2_E * dim**-0.5, norm_eps or 0.0, qkv.stride(0)),
            *(decode_rows.page_table.stride(0), splits, splits),
            KV=kv,
            GROUP=group,
            GROUP_BLOCK=FEW_QUERIES.value,
            DIM=dim,
            DIM_BLOCK=padded_head_dim(dim),
            HALF_BLOCK=padded_head_dim(dim // 2),
            PAGE=decode_rows.page_size,
            NORM=norm_eps is not None,
            SINGLE_SPLIT=splits == 1,
            WINDOW=window or 0,
            **tile_options(qkv.dtype, padded_head_dim(dim), tuning.fused_tile),
            **pdl_options(qkv.device),
        )

    def __call__(self, qkv: torch.Tensor, norm_weights: torch.Tensor | None, pool: LayerKV) -> torch.Tensor:
        """Attend in one layer, and store K and V of its newest tokens in ``pool``; return [R, heads, d]."""
        output = torch.empty(self._shape, dtype=qkv.dtype, device=qkv.device)
        partials, lse = self._merge.empty_partials(output)
        weights = qkv if norm_weights is None else norm_weights
        self._attend(qkv, weights, *pool, *self._tables, output, partials, lse)
        self._merge(partials, lse, output)
        return output
