"""QK-norm, RoPE and the store into the KV cache, fused into one launch between the QKV product and attention."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.triton.lora.expand import RANK_BLOCK
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import tuning_for

WARPS: Final = 2
EXPAND_HEADS: Final = 2
EXPAND_WARPS: Final = 4
"""With LoRA, whose B is MAX_RANK times as large as the heads. µs for 64 tokens, 16 slots of rank 16 and 48 heads above the
kernel without, by heads and warps, on one H200: 1, 4 2.5; 2, 4 1.9; 4, 8 2.5; 8, 8 3.9; 8, 4 12."""


@triton.jit
def qk_norm_rope_store_kv_kernel(
    qkv: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    norm_weights: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    lora_slots: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    inner_stride: tl.tensor,
    QUERY: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    LATE_DEPENDENTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Normalize, rotate and store HEADS of one token's heads.

    Grid: (tokens, blocks of HEADS among the QUERY + 2 * KV heads). Components i and i + DIM / 2 of a head rotate
    together (GPT-NeoX style), so a program holds the two halves of its heads apart. Value heads are copied unchanged.
    Every result is rounded to the type of the model where the reference, which works step by step, would round it.

    qkv                 [tokens, (QUERY + 2 * KV) * DIM], rows ``qkv_stride`` apart: query heads, then keys, then
                        values
    queries             [tokens, QUERY, DIM], written
    keys, values        [tokens of the pool, KV, DIM], written; in the type of qkv or in FP8, which saturates
    cos_sin             [positions, 2, DIM], in the type of qkv: the cosines and the sines of each angle, which stand
                        there twice
    positions           int32 [tokens]
    slot_mapping        int64 [tokens]: the place in the pool; K and V of a token with -1 (padding) go nowhere
    norm_weights        [2, DIM]: of queries and of keys; not read without NORM
    inner, b, ranks, lora_slots  see ``LoraExpand``, the rows of inner ``inner_stride`` apart; not read if MAX_RANK is 0
    eps                 float, of the norm
    HALF, HALF_BLOCK    DIM / 2, and that rounded up to a power of two
    LATE_DEPENDENTS     let the kernel behind this one start only when all kernels ahead have ended
    """
    if not LATE_DEPENDENTS:
        launch_dependents(PDL)
    dtype = queries.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    used = (head < QUERY + 2 * KV) & (column < HALF)
    if NORM:
        weight = norm_weights + tl.where(head < QUERY, 0, DIM) + column
        weight_low = tl.load(weight, used, 0.0).to(tl.float32)
        weight_high = tl.load(weight + HALF, used, 0.0).to(tl.float32)
    else:
        weight_low, weight_high = 1.0, 1.0
    wait_for_dependencies(PDL)
    if LATE_DEPENDENTS:
        launch_dependents(PDL)
    # All loads are issued before the first result is used, so that the program waits for memory once and not four
    # times.
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * DIM) + column
    location = tl.load(slot_mapping + token).to(tl.int64)
    source = qkv + token * qkv_stride + head * DIM + column
    low = tl.load(source, used, 0.0).to(tl.float32)
    high = tl.load(source + HALF, used, 0.0).to(tl.float32)
    cosine = tl.load(angle, column < HALF, 0.0).to(tl.float32)
    sine = tl.load(angle + DIM + HALF, column < HALF, 0.0).to(tl.float32)
    is_value = head >= QUERY + KV
    if MAX_RANK > 0:
        lora_slot = tl.load(lora_slots + token)
        is_adapted = lora_slot >= 0
        lora_slot = tl.maximum(lora_slot, 0)
        rank = tl.where(is_adapted, tl.load(ranks + lora_slot), 0)
        part = (head >= QUERY).to(tl.int32) + is_value.to(tl.int32)
        inner_part = inner + token * inner_stride + (lora_slot * 3 + part) * MAX_RANK
        row = lora_slot.to(tl.int64) * ((QUERY + 2 * KV) * DIM) + head * DIM + column
        added_low = tl.zeros((HEADS, HALF_BLOCK), tl.float32)
        added_high = tl.zeros((HEADS, HALF_BLOCK), tl.float32)
        for first in tl.static_range(0, MAX_RANK, RANK_BLOCK):
            r = first + tl.arange(0, RANK_BLOCK)[None, None, :]
            expanded = b + row[:, :, None] * MAX_RANK + r
            is_read = used[:, :, None] & is_adapted & (r < MAX_RANK)
            b_low = tl.load(expanded, is_read, 0.0).to(tl.float32)
            b_high = tl.load(expanded + HALF * MAX_RANK, is_read, 0.0).to(tl.float32)
            # No load waits for the rank; columns beyond it are multiplied by 0.
            factor = tl.load(inner_part[:, :, None] + r, r < MAX_RANK, 0.0).to(tl.float32)
            factor = tl.where(r < rank, factor, 0.0)
            added_low += tl.sum(b_low * factor, 2)
            added_high += tl.sum(b_high * factor, 2)
        low = (low + added_low).to(dtype).to(tl.float32)
        high = (high + added_high).to(dtype).to(tl.float32)
    rotated_low, rotated_high = normalize_and_rotate(
        low, high, weight_low, weight_high, cosine, sine, eps, DIM, NORM, dtype
    )
    low = tl.where(is_value, low, rotated_low).to(dtype)
    high = tl.where(is_value, high, rotated_high).to(dtype)
    is_query = used & (head < QUERY)
    target = queries + token * (QUERY * DIM) + head * DIM + column
    tl.store(target, low, is_query)
    tl.store(target + HALF, high, is_query)
    is_stored = used & (location >= 0)
    offset = location * (KV * DIM) + column
    target = keys + offset + (head - QUERY) * DIM
    is_key = is_stored & (head >= QUERY) & (head < QUERY + KV)
    tl.store(target, low.to(keys.dtype.element_ty), is_key)
    tl.store(target + HALF, high.to(keys.dtype.element_ty), is_key)
    target = values + offset + (head - QUERY - KV) * DIM
    tl.store(target, low.to(values.dtype.element_ty), is_stored & is_value)
    tl.store(target + HALF, high.to(values.dtype.element_ty), is_stored & is_value)


@triton.jit
def normalize_and_rotate(
    low: tl.tensor,
    high: tl.tensor,
    weight_low: tl.tensor,
    weight_high: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Normalize heads, with NORM, and rotate them; return their halves in float32, rounded to ``dtype`` at each step but the last.

    low, high           float32 [heads, HALF_BLOCK]: the halves of each head, with zeros behind DIM / 2
    weight_low, weight_high  those of the norm, which broadcast; not read without NORM
    cosine, sine        [1, HALF_BLOCK]
    """
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        low = ((low * scale).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
    rotated_low = (low * cosine).to(dtype).to(tl.float32) - (high * sine).to(dtype).to(tl.float32)
    rotated_high = (high * cosine).to(dtype).to(tl.float32) + (low * sine).to(dtype).to(tl.float32)
    return rotated_low, rotated_high


def launches_dependents_late(tokens: int) -> bool:
    """Return whether a launch for ``tokens`` lets the next kernel start only when all kernels ahead of both have ended.

    It can then read what those wrote before its own wait, such as the page table.
    """
    return tokens == 1


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    norm_weights: torch.Tensor | None,
    eps: float,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    expand: LoraExpand | None = None,
) -> torch.Tensor:
    """Do what ``kernels.qk_norm_rope.qk_norm_rope_store_kv`` does; do not store tokens with a negative place."""
    tokens = qkv.shape[0]
    kv, dim = pool[0].shape[1:]
    query = qkv.shape[1] // dim - 2 * kv
    heads = tuning_for(qkv.device).qk_norm_rope_heads if expand is None else EXPAND_HEADS
    queries = torch.empty((tokens, query, dim), dtype=qkv.dtype, device=qkv.device)
    tensors, inner_stride, max_rank = (qkv, qkv, qkv, qkv), 0, 0
    if expand is not None:
        weights = expand.weights
        assert weights.part_sizes == (query * dim, kv * dim, kv * dim)
        tensors = (expand.inner, weights.b, weights.ranks, expand.mapping.slots)
        inner_stride, max_rank = expand.inner.stride(0), weights.b.shape[2]
    if tokens:
        qk_norm_rope_store_kv_kernel[(tokens, triton.cdiv(query + 2 * kv, heads))](
            qkv,
            queries,
            pool[0],
            pool[1],
            cos_sin,
            positions,
            slot_mapping,
            qkv if norm_weights is None else norm_weights,
            *tensors,
            eps,
            qkv.stride(0),
            inner_stride,
            QUERY=query,
            KV=kv,
            DIM=dim,
            HALF=dim // 2,
            HALF_BLOCK=triton.next_power_of_2(dim // 2),
            HEADS=heads,
            NORM=norm_weights is not None,
            MAX_RANK=max_rank,
            RANK_BLOCK=RANK_BLOCK,
            LATE_DEPENDENTS=launches_dependents_late(tokens),
            num_warps=WARPS if expand is None else EXPAND_WARPS,
            **pdl_options(qkv.device),
        )
    return queries
