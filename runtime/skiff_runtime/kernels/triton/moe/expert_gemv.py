"""Products of few tokens with their experts, without sorting, as fast as the weights can be read.

With at most one pair of a token and an expert for every four experts, hardly any expert has two pairs, and the tiles of
a grouped product would be padding. Like ``triton.linear.gemv``, a program here multiplies two rows of weights with one
vector, in two launches:

    gate_up_gemv_kernel     a row of gate and the same of up, of one pair's expert: silu(gate) * up
    down_gemv_kernel        two outputs of one token: the sum over its experts, times their routing weights

The second computes whole outputs, since what it adds up over experts and over inputs is one sum: nothing is left to add
up behind it, and the order of the sum is fixed.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors
from skiff_runtime.kernels.tuning import ExpertGemvTile, ExpertGemvTuning, tuning_for

MIN_COLUMNS: Final = 256
"""The fewest columns of one loop iteration: a warp loads 16 bytes in each lane."""


@triton.jit(do_not_specialize=["first_expert"])
def gate_up_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    topk_ids: tl.tensor,
    output: tl.tensor,
    x_stride: tl.tensor,
    first_expert: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one value of silu(gate) * up of one pair.

    Grid: (OUTPUTS, pairs). The kernel behind starts only when all programs of this one have waited, so it may read
    ``topk_ids`` before it waits itself.

    x                   [tokens, INPUTS], rows ``x_stride`` apart; pair p is of token p // TOP_K
    weight              [EXPERTS, 2 * OUTPUTS, INPUTS]: of each expert the rows of gate, then those of up
    topk_ids            int32 [pairs]; the local experts are EXPERTS from ``first_expert`` on
    output              [pairs, OUTPUTS], written; rows of other ranks' experts are not
    COLUMNS             columns of one iteration
    """
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    row, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(topk_ids + pair) - first_expert
    if (expert < 0) | (expert >= EXPERTS):
        return
    run = tl.arange(0, COLUMNS)
    token = x + (pair // TOP_K).to(tl.int64) * x_stride
    gate_row = weight + (expert.to(tl.int64) * (2 * OUTPUTS) + row) * INPUTS
    up_row = gate_row + OUTPUTS * INPUTS
    gate_acc = tl.zeros((COLUMNS,), tl.float32)
    up_acc = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.static_range(0, INPUTS, COLUMNS):
        column = first + run
        inside = column < INPUTS
        gate_values = tl.load(gate_row + column, inside, 0.0).to(tl.float32)
        up_values = tl.load(up_row + column, inside, 0.0).to(tl.float32)
        x_values = tl.load(token + column, inside, 0.0).to(tl.float32)
        gate_acc += x_values * gate_values
        up_acc += x_values * up_values
    gate, up = tl.sum(gate_acc, 0), tl.sum(up_acc, 0)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + pair.to(tl.int64) * OUTPUTS + row, product.to(output.dtype.element_ty))


@triton.jit(do_not_specialize=["first_expert"])
def down_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    output: tl.tensor,
    first_expert: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRELOAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute two adjacent outputs of one token: the sum of its experts' outputs times their routing weights.

    Grid: (pairs of outputs, tokens). The experts are the rows of a tile, so that warps read different experts at a time:
    on an H200, eight experts of 768 inputs take 7.5 us so, and 9.1 us one behind the other by a single warp.

    x                   [tokens, TOP_K, INPUTS]
    weight              [EXPERTS, OUTPUTS, INPUTS]
    topk_weights        float32 [tokens, TOP_K]
    topk_ids            int32 [tokens, TOP_K]; the local experts are EXPERTS from ``first_expert`` on, others count 0
    output              [tokens, OUTPUTS], written
    TOP_K_BLOCK         TOP_K rounded up to a power of two
    PRELOAD             whether the weights are loaded before the kernel ahead has ended; that must be
                        ``gate_up_gemv_kernel``, whose programs have all waited for the routing when this one starts
    """
    if not PRELOAD:
        wait_for_dependencies(PDL)
    launch_dependents(PDL)
    token = tl.program_id(1)
    row = tl.program_id(0) * 2
    other = tl.minimum(row + 1, OUTPUTS - 1)
    run = tl.arange(0, COLUMNS)
    choice = tl.arange(0, TOP_K_BLOCK)
    pair = token * TOP_K + choice
    is_chosen = choice < TOP_K
    # From L2: without a wait, a line of an earlier step may still be in L1.
    expert = tl.load(topk_ids + pair, is_chosen, 0, cache_modifier=".cg") - first_expert
    is_here = (is_chosen & (expert >= 0) & (expert < EXPERTS))[:, None]
    factor = tl.load(topk_weights + pair, is_chosen, 0.0, cache_modifier=".cg")[:, None]
    expert_rows = expert.to(tl.int64) * OUTPUTS
    source = weight + (expert_rows + row)[:, None] * INPUTS
    other_source = weight + (expert_rows + other)[:, None] * INPUTS
    x_rows = x + pair.to(tl.int64)[:, None] * INPUTS
    acc = tl.zeros((TOP_K_BLOCK, COLUMNS), tl.float32)
    other_acc = tl.zeros((TOP_K_BLOCK, COLUMNS), tl.float32)
    loaded, other_loaded = no_tensors(), no_tensors()
    if PRELOAD:
        for first in tl.static_range(0, INPUTS, COLUMNS):
            column = (first + run)[None, :]
            inside = (column < INPUTS) & is_here
            loaded += (tl.load(source + column, inside, 0.0),)
            other_loaded += (tl.load(other_source + column, inside, 0.0),)
        wait_for_dependencies(PDL)
    for first in tl.static_range(0, INPUTS, COLUMNS):
        column = (first + run)[None, :]
        inside = (column < INPUTS) & is_here
        if PRELOAD:
            values, other_values = loaded[first // COLUMNS], other_loaded[first // COLUMNS]
        else:
            values = tl.load(source + column, inside, 0.0)
            other_values = tl.load(other_source + column, inside, 0.0)
        x_values = tl.load(x_rows + column, inside, 0.0).to(tl.float32) * factor
        acc += x_values * values.to(tl.float32)
        other_acc += x_values * other_values.to(tl.float32)
    at = output + token.to(tl.int64) * OUTPUTS + row
    tl.store(at, tl.sum(tl.sum(acc, 1), 0).to(output.dtype.element_ty))
    tl.store(at + 1, tl.sum(tl.sum(other_acc, 1), 0).to(output.dtype.element_ty), row + 1 < OUTPUTS)


def is_profitable(tokens: int, top_k: int, experts: int, device: torch.device) -> bool:
    """Return whether ``tokens`` tokens are computed without sorting: one, or few in relation to the experts."""
    return tokens == 1 or tokens * top_k * tuning_for(device).moe.experts_per_pair <= experts


def choose_down_tile(inputs: int, tuning: ExpertGemvTuning) -> ExpertGemvTile:
    """Return the tile of a down-projection of ``inputs`` intermediate values."""
    return tuning.down if inputs <= tuning.short_inputs else tuning.long_down


def choose_columns(inputs: int, tile: ExpertGemvTile) -> int:
    """Return the columns of one iteration: those of the tile, or fewer where that leaves fewer lanes idle at the end."""
    candidates: list[int] = []
    columns = tile.columns
    while columns >= min(MIN_COLUMNS, tile.columns):
        candidates.append(columns)
        columns //= 2
    return min(candidates, key=lambda each: (triton.cdiv(inputs, each) * each, -each))


def gate_up_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [T * top_k, I] of x [T, H] times weight [E, 2 * I, H], for topk_ids int32 [T, top_k].

    Experts are those from ``first_expert`` on; rows of others are not written. ``tile`` replaces the tuned one.
    """
    (experts, twice, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tile = tile or tuning_for(x.device).moe.gemv.gate_up
    output = torch.empty((tokens * top_k, twice // 2), dtype=x.dtype, device=x.device)
    launch(
        gate_up_gemv_kernel,
        (twice // 2, tokens * top_k, 1),
        (x, weight, topk_ids, output),
        (x.stride(0), first_expert),
        INPUTS=inputs,
        OUTPUTS=twice // 2,
        EXPERTS=experts,
        TOP_K=top_k,
        COLUMNS=choose_columns(inputs, tile),
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return output


def down_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return the weighted sums [T, H] of x [T * top_k, I] times weight [E, H, I].

    ``topk_weights`` float32 and ``topk_ids`` int32 are [T, top_k]. The kernel ahead must be ``gate_up_gemv``'s.
    """
    (experts, outputs, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tuning = tuning_for(x.device).moe.gemv
    tile = tile or choose_down_tile(inputs, tuning)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    columns, rows = choose_columns(inputs, tile), triton.next_power_of_2(top_k)
    launch(
        down_gemv_kernel,
        (triton.cdiv(outputs, 2), tokens, 1),
        (x, weight, topk_weights, topk_ids, output),
        (first_expert,),
        INPUTS=inputs,
        OUTPUTS=outputs,
        EXPERTS=experts,
        TOP_K=top_k,
        TOP_K_BLOCK=rows,
        COLUMNS=columns,
        PRELOAD=tuning.preload_down and inputs <= tuning.short_inputs,
        num_warps=min(tile.warps, max(1, rows * columns // MIN_COLUMNS)),
        **pdl_options(x.device),
    )
    return output
