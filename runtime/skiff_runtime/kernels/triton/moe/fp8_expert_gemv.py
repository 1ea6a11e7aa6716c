"""Products of few tokens with their FP8 experts, without sorting: ``expert_gemv`` in the arithmetic of ``fp8_gemv``.

Eight weights at a time are dequantized to float16, multiplied by float16 activations, and added up in fours there.
Activations of a single token come as float16; those of several are dequantized in each program, once for its two rows.
Between the two launches the intermediate values are quantized, for each pair of a token and an expert.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import E4M3, FP16_DOWNSCALE, QuantizedActivations
from skiff_runtime.kernels.triton.fp8.dequantize import dequantize_fp8x8, dot_fp8x8, supports_fp8_ptx
from skiff_runtime.kernels.triton.moe.expert_gemv import (
    choose_columns,
    choose_down_tile,
    prefetch_experts,
)
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import ExpertGemvTile, tuning_for

_EIGHT = tl.constexpr(8)
"""FP8 numbers in an int64, in which they are loaded."""
_SCALE_BLOCK = tl.constexpr(128)
_EIGHTS_OF_BLOCK = tl.constexpr(16)
"""The int64 of 128 FP8 numbers, which have one scale in block FP8."""
_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)


@triton.jit
def _load_x(
    x: tl.tensor, at: tl.tensor, inside: tl.tensor, X_IS_FP8: tl.constexpr, USE_PTX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the eight activations at each index of eights, as ``dot_fp8x8`` takes them, from a token at int64 ``x``."""
    if X_IS_FP8:
        low, high = dequantize_fp8x8(tl.load(x + at, inside, 0), USE_PTX)
    else:
        low, high = tl.load(x + 2 * at, inside, 0), tl.load(x + 2 * at + 1, inside, 0)
    return low, high


@triton.jit(do_not_specialize=["token_stride", "group_stride", "first_expert"])
def fp8_gate_up_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    topk_ids: tl.tensor,
    output: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    first_expert: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one value of silu(gate) * up of one pair.

    Grid: (OUTPUTS, pairs), as ``gate_up_gemv_kernel``.

    x                   [tokens, INPUTS], contiguous: FP8, or for a single token float16, divided by ``FP16_DOWNSCALE``
    weight              FP8 [EXPERTS, 2 * OUTPUTS, INPUTS]; INPUTS is a multiple of 8
    x_scales            float32 [tokens, 1], or [tokens, INPUTS / 128] with HAS_BLOCKS; tokens are ``token_stride``
                        apart and groups ``group_stride``
    scales              float32 [EXPERTS, 2 * OUTPUTS], or [EXPERTS, 2 * OUTPUTS / 128, INPUTS / 128] with HAS_BLOCKS
    topk_ids            int32 [pairs]; the local experts are EXPERTS from ``first_expert`` on
    output              [pairs, OUTPUTS], written, in the type of the model; rows of other ranks' experts are not
    COLUMNS             columns of one iteration
    """
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    row, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(topk_ids + pair) - first_expert
    if (expert < 0) | (expert >= EXPERTS):
        return
    EIGHTS: tl.constexpr = INPUTS // _EIGHT
    RUN: tl.constexpr = COLUMNS // _EIGHT
    SCALE_COLUMNS: tl.constexpr = INPUTS // _SCALE_BLOCK
    run = tl.arange(0, RUN)
    token = pair // TOP_K
    expert = expert.to(tl.int64)
    x_row = (x + token.to(tl.int64) * INPUTS).to(tl.pointer_type(tl.int64))
    gate_row = weight + (expert * (2 * OUTPUTS) + row) * INPUTS
    up_row = (gate_row + OUTPUTS * INPUTS).to(tl.pointer_type(tl.int64))
    gate_row = gate_row.to(tl.pointer_type(tl.int64))
    gate_acc = tl.zeros((RUN,), tl.float32)
    up_acc = tl.zeros((RUN,), tl.float32)
    for first in tl.static_range(0, EIGHTS, RUN):
        at = first + run
        inside = at < EIGHTS
        gate_values = tl.load(gate_row + at, inside, 0)
        up_values = tl.load(up_row + at, inside, 0)
        x_low, x_high = _load_x(x_row, at, inside, X_IS_FP8, USE_PTX)
        gate_sums = dot_fp8x8(gate_values, x_low, x_high, USE_PTX)
        up_sums = dot_fp8x8(up_values, x_low, x_high, USE_PTX)
        if HAS_BLOCKS:
            group = at // _EIGHTS_OF_BLOCK
            x_scale = tl.load(x_scales + token * token_stride + group * group_stride, inside, 0.0)
            blocks = scales + (expert * (2 * OUTPUTS // _SCALE_BLOCK) + row // _SCALE_BLOCK) * SCALE_COLUMNS
            gate_sums *= x_scale * tl.load(blocks + group, inside, 0.0)
            up_sums *= x_scale * tl.load(
                blocks + OUTPUTS // _SCALE_BLOCK * SCALE_COLUMNS + group, inside, 0.0
            )
        gate_acc += gate_sums
        up_acc += up_sums
    gate, up = tl.sum(gate_acc, 0), tl.sum(up_acc, 0)
    if not HAS_BLOCKS:
        x_scale = tl.load(x_scales + token * token_stride)
        channel_scales = scales + expert * (2 * OUTPUTS) + row
        gate *= x_scale * tl.load(channel_scales)
        up *= x_scale * tl.load(channel_scales + OUTPUTS)
    if X_IS_FP8:
        gate *= _FP16_DOWNSCALE
        up *= _FP16_DOWNSCALE
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + pair.to(tl.int64) * OUTPUTS + row, product.to(output.dtype.element_ty))


@triton.jit(do_not_specialize=["token_stride", "group_stride", "first_expert"])
def fp8_down_gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    topk_weights: tl.tensor,
    topk_ids: tl.tensor,
    output: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    first_expert: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute two adjacent outputs of one token: the sum of its experts' outputs times their routing weights.

    Grid: (pairs of outputs, tokens), as ``down_gemv_kernel``. The kernel ahead quantizes the intermediate values, and
    began after ``fp8_gate_up_gemv_kernel``, which began after the experts were selected.

    x                   [tokens, TOP_K, INPUTS], contiguous: FP8, or for a single pair float16, divided by
                        ``FP16_DOWNSCALE``
    weight              FP8 [EXPERTS, OUTPUTS, INPUTS]; INPUTS is a multiple of 8
    x_scales            float32 [pairs, 1], or [pairs, INPUTS / 128] with HAS_BLOCKS; pairs are ``token_stride`` apart
                        and groups ``group_stride``
    scales              float32 [EXPERTS, OUTPUTS], or [EXPERTS, OUTPUTS / 128, INPUTS / 128] with HAS_BLOCKS
    topk_weights        float32 [tokens, TOP_K]
    topk_ids            int32 [tokens, TOP_K]; the local experts are EXPERTS from ``first_expert`` on, others count 0
    output              [tokens, OUTPUTS], written, in the type of the model
    """
    token = tl.program_id(1)
    row = tl.program_id(0) * 2
    other = tl.minimum(row + 1, OUTPUTS - 1)
    if PREFETCH:
        prefetch_experts(
            weight, topk_ids + token * TOP_K, first_expert, row, other, INPUTS, OUTPUTS, EXPERTS, TOP_K, PDL
        )
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // _EIGHT
    RUN: tl.constexpr = COLUMNS // _EIGHT
    SCALE_COLUMNS: tl.constexpr = INPUTS // _SCALE_BLOCK
    run = tl.arange(0, RUN)
    acc = tl.zeros((RUN,), tl.float32)
    other_acc = tl.zeros((RUN,), tl.float32)
    for each in tl.static_range(TOP_K):
        pair = token * TOP_K + each
        expert = (tl.load(topk_ids + pair) - first_expert).to(tl.int64)
        is_here = (expert >= 0) & (expert < EXPERTS)
        factor = tl.load(topk_weights + pair)
        if X_IS_FP8:
            factor *= _FP16_DOWNSCALE
        other_factor = factor
        if not HAS_BLOCKS:
            factor *= tl.load(x_scales + pair * token_stride, is_here, 0.0)
            other_factor = factor * tl.load(scales + expert * OUTPUTS + other, is_here, 0.0)
            factor *= tl.load(scales + expert * OUTPUTS + row, is_here, 0.0)
        x_row = (x + pair.to(tl.int64) * INPUTS).to(tl.pointer_type(tl.int64))
        source = (weight + (expert * OUTPUTS + row) * INPUTS).to(tl.pointer_type(tl.int64))
        other_source = (weight + (expert * OUTPUTS + other) * INPUTS).to(tl.pointer_type(tl.int64))
        for first in tl.static_range(0, EIGHTS, RUN):
            at = first + run
            inside = (at < EIGHTS) & is_here
            values = tl.load(source + at, inside, 0)
            other_values = tl.load(other_source + at, inside, 0)
            x_low, x_high = _load_x(x_row, at, inside, X_IS_FP8, USE_PTX)
            sums = dot_fp8x8(values, x_low, x_high, USE_PTX)
            other_sums = dot_fp8x8(other_values, x_low, x_high, USE_PTX)
            if HAS_BLOCKS:
                # Both rows are in one block: they are adjacent, and the first is even.
                group = at // _EIGHTS_OF_BLOCK
                blocks = scales + (expert * (OUTPUTS // _SCALE_BLOCK) + row // _SCALE_BLOCK) * SCALE_COLUMNS
                scale = tl.load(x_scales + pair * token_stride + group * group_stride, inside, 0.0)
                scale *= tl.load(blocks + group, inside, 0.0)
                sums *= scale
                other_sums *= scale
            acc += sums * factor
            other_acc += other_sums * other_factor
    at_output = output + token.to(tl.int64) * OUTPUTS + row
    tl.store(at_output, tl.sum(acc, 0).to(output.dtype.element_ty))
    tl.store(at_output + 1, tl.sum(other_acc, 0).to(output.dtype.element_ty), row + 1 < OUTPUTS)


def fp8_gate_up_gemv(
    x: QuantizedActivations,
    weight: torch.Tensor,
    scales: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [T * top_k, I] of x [T, H] times weight FP8 [E, 2 * I, H].

    ``scales`` are float32 [E, 2 * I], or [E, 2 * I / 128, H / 128] if x is quantized in groups. ``topk_ids`` int32
    [T, top_k]: experts are those from ``first_expert`` on; rows of others are not written. ``tile`` replaces the tuned
    one.
    """
    (experts, twice, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tile = tile or tuning_for(weight.device).moe.fp8_gemv.gate_up
    output = torch.empty((tokens * top_k, twice // 2), dtype=x.dtype, device=weight.device)
    launch(
        fp8_gate_up_gemv_kernel,
        (twice // 2, tokens * top_k, 1),
        (x.values, weight, x.scales, scales, topk_ids, output),
        (*x.scales.stride(), first_expert),
        INPUTS=inputs,
        OUTPUTS=twice // 2,
        EXPERTS=experts,
        TOP_K=top_k,
        **_options(x, scales, tile),
    )
    return output


def fp8_down_gemv(
    x: QuantizedActivations,
    weight: torch.Tensor,
    scales: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return the weighted sums [T, H] of x [T * top_k, I] times weight FP8 [E, H, I].

    ``scales`` are float32 [E, H], or [E, H / 128, I / 128] if x is quantized in groups. ``topk_weights`` float32 and
    ``topk_ids`` int32 are [T, top_k]. The kernels ahead must be ``fp8_gate_up_gemv``'s and the quantization of x.
    """
    (experts, outputs, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tile = tile or choose_down_tile(inputs, tuning_for(weight.device).moe.fp8_gemv)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=weight.device)
    launch(
        fp8_down_gemv_kernel,
        (triton.cdiv(outputs, 2), tokens, 1),
        (x.values, weight, x.scales, scales, topk_weights, topk_ids, output),
        (*x.scales.stride(), first_expert),
        INPUTS=inputs,
        OUTPUTS=outputs,
        EXPERTS=experts,
        TOP_K=top_k,
        PREFETCH=True,
        **_options(x, scales, tile),
    )
    return output


def _options(x: QuantizedActivations, scales: torch.Tensor, tile: ExpertGemvTile) -> dict[str, Any]:
    device = x.values.device
    return {
        "COLUMNS": choose_columns(x.values.shape[1], tile),
        "HAS_BLOCKS": scales.dim() == 3,
        "X_IS_FP8": x.values.dtype == E4M3,
        "USE_PTX": supports_fp8_ptx(device),
        "num_warps": tile.warps,
        **pdl_options(device),
    }
