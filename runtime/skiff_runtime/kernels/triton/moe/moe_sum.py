"""The sum of each token's pairs, behind a grouped down-projection (vLLM: ``moe_sum``).

Pairs are added in the order of the token's experts, in float32, so the sum is always the same to the bit.
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


@triton.jit(do_not_specialize=["first_expert"])
def moe_sum_kernel(
    x: tl.tensor,
    topk_ids: tl.tensor,
    output: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add up BLOCK columns of the pairs of one token.

    Grid: (tokens, blocks of BLOCK columns).

    x                   [tokens * TOP_K, WIDTH]: weighted outputs; rows of other ranks' experts are not read
    topk_ids            int32 [tokens, TOP_K]: the local experts are EXPERTS from ``first_expert`` on
    output              [tokens, WIDTH], written, in the type of x
    """
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    acc = tl.zeros((BLOCK,), tl.float32)
    for each in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + each) - first_expert
        inside = (column < WIDTH) & (expert >= 0) & (expert < EXPERTS)
        acc += tl.load(x + (token * TOP_K + each) * WIDTH + column, inside, 0.0).to(tl.float32)
    tl.store(output + token * WIDTH + column, acc.to(output.dtype.element_ty), column < WIDTH)


def moe_sum(
    x: torch.Tensor, topk_ids: torch.Tensor, output: torch.Tensor, *, first_expert: int, experts: int
) -> None:
    """Write the sums of x [T * top_k, H] over the pairs of each token to output [T, H].

    ``topk_ids`` int32 [T, top_k]; rows of x whose experts are not among ``experts`` from ``first_expert`` on count 0.
    """
    (tokens, top_k), width = topk_ids.shape, x.shape[1]
    tuning = tuning_for(x.device).moe
    launch(
        moe_sum_kernel,
        (tokens, triton.cdiv(width, tuning.sum_block), 1),
        (x, topk_ids, output),
        (first_expert,),
        EXPERTS=experts,
        TOP_K=top_k,
        WIDTH=width,
        BLOCK=tuning.sum_block,
        num_warps=tuning.sum_warps,
        **pdl_options(x.device),
    )
