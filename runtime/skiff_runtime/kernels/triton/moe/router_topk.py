"""The router of mixture of experts for few tokens: logits, softmax and top-k, and the norm before them, in one launch.

The problem: a step of one token launches the norm, the router's product and the selection of experts one after another,
and each launch costs about as much time as its work. The idea, as in stream-K: every program computes the logits of a
few experts, and the one that comes last, by an atomic counter of the token, selects the experts from all of them.

The norm can be a part of it because it is cheap for one row: every program normalizes the token itself, and the first
one stores the result, which the experts need as well, and the sum with the residual.

Invariant: counters are all zero between launches, so a CUDA graph may be replayed, and one launch for a router is in
flight at a time. Nothing depends on which program comes last: logits and selection have the bits of any other order.

Memory order: all threads of a program have stored their logits at its barrier, behind which one thread counts, with
release and acquire at the GPU's scope. Releases are cumulative, so the program that counts last sees the logits of all
others. It loads them from L2, because the L1 cache of its multiprocessor may hold what was there before.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.moe.fused_topk import empty_routing, select_experts
from skiff_runtime.kernels.triton.norm_act.rms_norm import normalize_row, row_warps
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors
from skiff_runtime.kernels.tuning import tuning_for


@triton.jit
def router_topk_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    router_logits: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    counters: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    logits_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ADD_NORM: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS logits of one token; the last program of a token selects its experts.

    Grid: (runs of ROWS experts, tokens), WARPS warps a program. The router's rows and the norm's weight are loaded before
    the kernel ahead has ended. The norm has the bits of ``rms_norm_kernel``, the logits those of ``gemv_kernel`` with
    BLOCK columns and as many warps, and the routing those of ``fused_topk_kernel`` for 128 experts, and for fewer where
    they are a power of two; for others it may add the softmax up in another order.

    x, residual         [tokens, WIDTH], rows ``x_stride`` and ``residual_stride`` apart; with ADD_NORM the token is the
                        norm of their sum, without it x, and the residual is not read
    norm_weight         [WIDTH]; not read without ADD_NORM
    weight              [EXPERTS, WIDTH]
    total, normed       [tokens, WIDTH], written with ADD_NORM: the sum and its norm, in the type of the model
    router_logits       float32 [tokens, EXPERTS], rows ``logits_stride`` apart, written
    topk_weights, topk_ids, EXPERTS_BLOCK  as ``fused_topk_kernel``
    counters            int32 [tokens at least], all zero before and after: the programs of a token that are done
    eps                 float
    BLOCK               WIDTH rounded up to a power of two
    """
    launch_dependents(PDL)
    program, token = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    loaded = no_tensors()
    for i in tl.static_range(ROWS):
        # The last rows may not exist; what they give is not stored.
        expert = tl.minimum(program * ROWS + i, EXPERTS - 1)
        loaded += (tl.load(weight + expert * WIDTH + columns, inside, 0.0),)
    if ADD_NORM:
        norm_weights = tl.load(norm_weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    row = token.to(tl.int64)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if ADD_NORM:
        value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
        dtype = total.dtype.element_ty
        rounded = value.to(dtype)
        result = normalize_row(rounded.to(tl.float32), norm_weights, eps, WIDTH, dtype)
        value = result.to(tl.float32)
    zeros = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(ROWS):
        expert = program * ROWS + i
        logit = tl.sum(tl.fma(value, loaded[i].to(tl.float32), zeros), 0)
        tl.store(router_logits + row * logits_stride + expert, logit, expert < EXPERTS)
    # All threads of the program must have stored before the counter says that its logits are there.
    tl.debug_barrier()
    done = tl.atomic_add(counters + token, 1, sem="acq_rel", scope="gpu")
    if ADD_NORM:  # noqa: SIM102 (a constexpr and a tensor: only the former drops what is below it)
        # Behind the counter, which would have to wait until they are visible.
        if program == 0:
            tl.store(total + row * WIDTH + columns, rounded, inside)
            tl.store(normed + row * WIDTH + columns, result, inside)
    if done == tl.num_programs(0) - 1:
        tl.store(counters + token, 0)
        select_experts(
            router_logits,
            topk_weights,
            topk_ids,
            token + tl.arange(0, WARPS),
            token + 1,
            logits_stride,
            EXPERTS,
            EXPERTS_BLOCK,
            TOP_K,
            RENORMALIZE,
            CACHE_MODIFIER=".cg",
        )


def is_profitable(x: torch.Tensor, counters: torch.Tensor) -> bool:
    """Return whether ``router_topk`` supports x [T, H] and is faster than a product and ``fused_topk``."""
    most = min(tuning_for(x.device).moe.max_router_topk_tokens, len(counters))
    return 1 <= len(x) <= most and x.dtype != torch.float32


def is_norm_profitable(x: torch.Tensor, counters: torch.Tensor) -> bool:
    """Return whether ``add_rms_norm_router_topk`` is faster than a norm and ``router_topk``."""
    return tuning_for(x.device).moe.fuse_router_norm and is_profitable(x, counters)


def router_topk(
    x: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``kernels.fused_moe.route`` does."""
    return _launch(x, x, weight, weight, x, x, counters, 0.0, top_k, renormalize=renormalize, add_norm=False)


def add_rms_norm_router_topk(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    counters: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``kernels.fused_moe.add_rms_norm_route`` does."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    routing = _launch(
        *(x, residual, norm_weight, weight, total, normed, counters, eps, top_k),
        renormalize=renormalize,
        add_norm=True,
    )
    return normed, total, *routing


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    normed: torch.Tensor,
    counters: torch.Tensor,
    eps: float,
    top_k: int,
    *,
    renormalize: bool,
    add_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, width), experts, device = x.shape, len(weight), x.device
    assert weight.is_contiguous() and tokens <= len(counters)
    weights, ids = empty_routing(tokens, experts, top_k, device)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=device)
    rows, warps = tuning_for(device).moe.router_topk_rows, row_warps(width)
    launch(
        router_topk_kernel,
        (triton.cdiv(experts, rows), tokens, 1),
        (x, residual, norm_weight, weight, total, normed, logits, weights, ids, counters),
        (x.stride(0), residual.stride(0), logits.stride(0), eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        ROWS=rows,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        ADD_NORM=add_norm,
        WARPS=warps,
        num_warps=warps,
        **pdl_options(device),
    )
    return weights, ids
