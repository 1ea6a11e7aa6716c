"""From the product of query, key and value to queries ready to attend, and keys and values in the cache: one launch."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

HEADS = 8
"""Heads of a token that one program works on."""


@triton.jit
def _place(
    qkv: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    weights: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    QUERY: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    kind = queries.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < QUERY + 2 * KV) & (column < HALF)
    if NORM:
        weight = weights + tl.where(head < QUERY, 0, DIM) + column
        weight_low = tl.load(weight, inside, 0.0).to(tl.float32)
        weight_high = tl.load(weight + HALF, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    # All that is read is asked for at once: one wait for memory, not four.
    angle = table + tl.load(positions + token).to(tl.int64) * (2 * DIM) + column
    location = tl.load(slot_mapping + token).to(tl.int64)
    source = qkv + token * qkv_stride + head * DIM + column
    low = tl.load(source, inside, 0.0).to(tl.float32)
    high = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    cosine = tl.load(angle, column < HALF, 0.0).to(tl.float32)
    sine = tl.load(angle + DIM + HALF, column < HALF, 0.0).to(tl.float32)
    is_value = head >= QUERY + KV
    turned_low, turned_high = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        turned_low = (low * scale).to(kind).to(tl.float32) * weight_low
        turned_high = (high * scale).to(kind).to(tl.float32) * weight_high
        turned_low = turned_low.to(kind).to(tl.float32)
        turned_high = turned_high.to(kind).to(tl.float32)
    first = (turned_low * cosine).to(kind).to(tl.float32) - (turned_high * sine).to(kind).to(tl.float32)
    second = (turned_high * cosine).to(kind).to(tl.float32) + (turned_low * sine).to(kind).to(tl.float32)
    low = tl.where(is_value, low, first).to(kind)
    high = tl.where(is_value, high, second).to(kind)
    is_query = inside & (head < QUERY)
    target = queries + token * (QUERY * DIM) + head * DIM + column
    tl.store(target, low, is_query)
    tl.store(target + HALF, high, is_query)
    is_kept = inside & (location >= 0)
    place = location * (KV * DIM) + column
    target = keys + place + (head - QUERY) * DIM
    is_key = is_kept & (head >= QUERY) & (head < QUERY + KV)
    tl.store(target, low.to(keys.dtype.element_ty), is_key)
    tl.store(target + HALF, high.to(keys.dtype.element_ty), is_key)
    target = values + place + (head - QUERY - KV) * DIM
    tl.store(target, low.to(values.dtype.element_ty), is_kept & is_value)
    tl.store(target + HALF, high.to(values.dtype.element_ty), is_kept & is_value)


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    eps: float,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As ``kernels.heads.qk_norm_rope_store_kv``; a token with a location below 0 leaves nothing in the pool."""
    tokens = qkv.shape[0]
    kv, dim = pool[0].shape[1:]
    query = qkv.shape[1] // dim - 2 * kv
    queries = torch.empty((tokens, query, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _place[(tokens, triton.cdiv(query + 2 * kv, HEADS))](
            qkv,
            queries,
            pool[0],
            pool[1],
            table,
            positions,
            slot_mapping,
            qkv if weights is None else weights,
            eps,
            qkv.stride(0),
            QUERY=query,
            KV=kv,
            DIM=dim,
            HALF=dim // 2,
            HALF_BLOCK=triton.next_power_of_2(dim // 2),
            HEADS=HEADS,
            NORM=weights is not None,
            num_warps=2,
            **pdl_options(qkv.device),
        )
    return queries
