"""Routing of mixture of experts: softmax over all experts and the top-k of each token, in one launch.

The problem: to select k of E experts takes k searches for the largest logit, one after another, and at batch 1 nothing
else runs meanwhile. The idea: float32 numbers are ordered as integers, and a warp finds the largest of its lanes'
integers in one instruction, as it does the lowest expert among equals. So a token is one warp's work, in registers; a
selected expert keeps its rank in its own lane, from which it is stored at the end, so nothing passes through shared
memory between the searches.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import tuning_for

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-0x80000000)


@triton.jit(do_not_specialize=["tokens"])
def fused_topk_kernel(
    router_logits: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Route TOKENS tokens.

    Grid: (blocks of TOKENS tokens), one warp for each token.

    router_logits       float32 [tokens, EXPERTS], rows ``stride`` apart
    topk_weights        float32 [tokens, TOP_K], written, the largest first; with RENORMALIZE their sum is 1
    topk_ids            int32 [tokens, TOP_K], written; of equal logits the lower expert comes first
    EXPERTS_BLOCK       EXPERTS rounded up to a power of two

    A row that contains NaN gets weights of NaN, and experts that exist.
    """
    launch_dependents(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wait_for_dependencies(PDL)
    select_experts(
        router_logits,
        topk_weights,
        topk_ids,
        token,
        tokens,
        stride,
        EXPERTS,
        EXPERTS_BLOCK,
        TOP_K,
        RENORMALIZE,
        CACHE_MODIFIER="",
    )


@triton.jit
def select_experts(
    router_logits: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CACHE_MODIFIER: tl.constexpr,
) -> None:
    """Route the tokens with indices ``token`` [one for each warp of the program], those below ``tokens``.

    The other arguments are those of ``fused_topk_kernel``; CACHE_MODIFIER is that of the loads of logits.
    """
    expert = tl.arange(0, EXPERTS_BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (expert < EXPERTS)
    row = token.to(tl.int64)[:, None]
    at = router_logits + row * stride + expert
    logit = tl.load(at, inside, -float("inf"), cache_modifier=CACHE_MODIFIER)
    # Both zeros are equal, and have the same key. NaN, whatever its sign, is the largest.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    bits = tl.where(logit == logit, bits, _MAGNITUDE)
    key = tl.where(expert < EXPERTS, bits ^ ((bits >> 31) & _MAGNITUDE), _LEAST)
    rank = tl.full(key.shape, TOP_K, tl.int32)
    for each in tl.static_range(TOP_K):
        best = tl.max(key, 1)[:, None]
        chosen = tl.min(tl.where(key == best, expert, EXPERTS_BLOCK), 1)[:, None]
        rank = tl.where(expert == chosen, each, rank)
        key = tl.where(expert == chosen, _LEAST, key)
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    selected = rank < TOP_K
    if RENORMALIZE:
        weight = weight / tl.sum(tl.where(selected, weight, 0.0), 1)[:, None]
    tl.store(topk_weights + row * TOP_K + rank, weight, inside & selected)
    tl.store(topk_ids + row * TOP_K + rank, expert + tl.zeros_like(rank), inside & selected)


def fused_topk(
    router_logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``kernels.fused_moe.fused_topk`` does, with logits [T, E] at any row stride."""
    (tokens, experts), device = router_logits.shape, router_logits.device
    weights, ids = empty_routing(tokens, experts, top_k, device)
    if tokens == 0:
        return weights, ids
    warps = tuning_for(device).moe.routing_warps
    launch(
        fused_topk_kernel,
        (triton.cdiv(tokens, warps), 1, 1),
        (router_logits, weights, ids),
        (tokens, router_logits.stride(0)),
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        TOKENS=warps,
        num_warps=warps,
        **pdl_options(device),
    )
    return weights, ids


def empty_routing(
    tokens: int, experts: int, top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (weights float32, ids int32), both [tokens, top_k]; raise ``ValueError`` if there are fewer experts."""
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"top_k must be at least 1 and at most the number of experts, {experts}, not {top_k}"
        )
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    return weights, torch.empty((tokens, top_k), dtype=torch.int32, device=device)
