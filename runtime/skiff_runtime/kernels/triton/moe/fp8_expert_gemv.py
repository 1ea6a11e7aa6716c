"""Products of few tokens with their FP8 experts, without sorting: ``expert_gemv`` in the arithmetic of ``fp8_gemv``.

Eight weights at a time are dequantized to float16, multiplied by float16 activations, and added up in fours there.
Activations come quantized, of a single token as float16 and of several as FP8, or in the type of the model: then each
program quantizes what it multiplies (``fp8.fused_quantize``), and no launch stands between the two products. Block FP8
always comes quantized: its many scales take programs longer than a launch does.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import E4M3, FP16_DOWNSCALE, QuantizedActivations
from skiff_runtime.kernels.triton.fp8 import fused_quantize
from skiff_runtime.kernels.triton.fp8.dequantize import dequantize_fp8x8, dot_fp8x8, supports_fp8_ptx
from skiff_runtime.kernels.triton.fp8.fused_quantize import (
    arange_for_x8,
    load_int64,
    load_x8,
    max_abs_x8,
    quantize_x4,
)
from skiff_runtime.kernels.triton.fp8.quantize import compute_scale
from skiff_runtime.kernels.triton.moe.expert_gemv import MIN_COLUMNS, choose_columns, choose_down_tile
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors
from skiff_runtime.kernels.tuning import ExpertGemvTile, tuning_for

SCALE_BLOCK = 128
"""The inputs, and the outputs, that have one scale in block FP8."""
_EIGHT = tl.constexpr(8)
"""FP8 numbers in an int64, in which they are loaded."""
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_EIGHTS_OF_BLOCK = tl.constexpr(SCALE_BLOCK // 8)
_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)


@triton.jit
def _load_x(
    x: tl.tensor, at: tl.tensor, inside: tl.tensor | None, X_IS_FP8: tl.constexpr, USE_PTX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the eight activations at each index of eights, as ``dot_fp8x8`` takes them.

    ``x`` points to int64; ``inside`` may be ``None``.
    """
    if X_IS_FP8:
        low, high = dequantize_fp8x8(load_int64(x + at, inside), USE_PTX)
    else:
        low, high = load_x8(x, at, inside)
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
    ROWS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS adjacent values of silu(gate) * up of one pair.

    Grid: (runs of ROWS outputs, pairs), as ``gate_up_gemv_kernel``. A program loads all of its weights before it looks
    at its token: they are on their way while it searches for the token's largest magnitude.

    x                   [tokens, INPUTS], contiguous: FP8, or for a single token float16, divided by
                        ``FP16_DOWNSCALE``; with QUANTIZE, and never with HAS_BLOCKS, bfloat16 or float16
    weight              FP8 [EXPERTS, 2 * OUTPUTS, INPUTS]; INPUTS is a multiple of 8
    x_scales            float32 [tokens, 1], or [tokens, INPUTS / 128] with HAS_BLOCKS; tokens are ``token_stride``
                        apart and groups ``group_stride``; not read with QUANTIZE
    scales              float32 [EXPERTS, 2 * OUTPUTS], or [EXPERTS, 2 * OUTPUTS / 128, INPUTS / 128] with HAS_BLOCKS
    topk_ids            int32 [pairs]; the local experts are EXPERTS from ``first_expert`` on
    output              [pairs, OUTPUTS], written, in the type of the model; rows of other ranks' experts are not
    COLUMNS             columns of one iteration; with HAS_BLOCKS a multiple of 128
    """
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    pair = tl.program_id(1)
    expert = tl.load(topk_ids + pair) - first_expert
    if (expert < 0) | (expert >= EXPERTS):
        return
    EIGHTS: tl.constexpr = INPUTS // _EIGHT
    RUN: tl.constexpr = COLUMNS // _EIGHT
    SCALE_COLUMNS: tl.constexpr = INPUTS // _SCALE_BLOCK
    UP_BLOCKS: tl.constexpr = OUTPUTS // _SCALE_BLOCK * SCALE_COLUMNS
    DTYPE: tl.constexpr = x.dtype.element_ty
    run = arange_for_x8(RUN)
    row = tl.program_id(0) * ROWS
    token = pair // TOP_K
    expert = expert.to(tl.int64)
    x_row = (x + token.to(tl.int64) * INPUTS).to(tl.pointer_type(tl.int64))
    expert_weight = (weight + expert * (2 * OUTPUTS * INPUTS)).to(tl.pointer_type(tl.int64))
    x_lows, x_highs, x_factors, gates, ups = (
        no_tensors(),
        no_tensors(),
        no_tensors(),
        no_tensors(),
        no_tensors(),
    )
    for first in tl.static_range(0, EIGHTS, RUN):
        at = first + run
        # Loads without a mask, where there is nothing to mask, need no zeros in their registers before.
        inside = None if EIGHTS % RUN == 0 else at < EIGHTS
        low, high = _load_x(x_row, at, inside, X_IS_FP8, USE_PTX)
        x_lows += (low,)
        x_highs += (high,)
        for i in tl.static_range(ROWS):
            # The last rows may not exist; what they give is not stored.
            gate_row = expert_weight + tl.minimum(row + i, OUTPUTS - 1) * EIGHTS
            gates += (load_int64(gate_row + at, inside),)
            ups += (load_int64(gate_row + OUTPUTS * EIGHTS + at, inside),)
    gate_scales, up_scales = no_tensors(), no_tensors()
    if not HAS_BLOCKS:
        for i in tl.static_range(ROWS):
            channel_scales = scales + expert * (2 * OUTPUTS) + tl.minimum(row + i, OUTPUTS - 1)
            gate_scales += (tl.load(channel_scales),)
            up_scales += (tl.load(channel_scales + OUTPUTS),)
    token_scale = 1.0
    if QUANTIZE:
        largest = tl.zeros((RUN,), tl.float32)
        for i in tl.static_range(len(x_lows)):
            largest = tl.maximum(largest, max_abs_x8(x_lows[i], x_highs[i], DTYPE, USE_PTX))
        token_scale = compute_scale(tl.max(largest, 0))
        reciprocal = tl.div_rn(1.0, token_scale)
        quantized_lows, quantized_highs = no_tensors(), no_tensors()
        for i in tl.static_range(len(x_lows)):
            quantized_lows += (quantize_x4(x_lows[i], reciprocal, DTYPE, USE_PTX),)
            quantized_highs += (quantize_x4(x_highs[i], reciprocal, DTYPE, USE_PTX),)
        x_lows, x_highs = quantized_lows, quantized_highs
    elif HAS_BLOCKS:
        for first in tl.static_range(0, EIGHTS, RUN):
            group = (first + run) // _EIGHTS_OF_BLOCK
            at_scale = x_scales + token * token_stride + group * group_stride
            x_factors += (tl.load(at_scale, first + run < EIGHTS, 0.0),)
    else:
        token_scale = tl.load(x_scales + token * token_stride)
    if X_IS_FP8 or QUANTIZE:
        token_scale *= _FP16_DOWNSCALE
    for i in tl.static_range(ROWS):
        gate_acc = tl.zeros((RUN,), tl.float32)
        up_acc = tl.zeros((RUN,), tl.float32)
        for k in tl.static_range(len(x_lows)):
            gate_sums = dot_fp8x8(gates[k * ROWS + i], x_lows[k], x_highs[k], USE_PTX)
            up_sums = dot_fp8x8(ups[k * ROWS + i], x_lows[k], x_highs[k], USE_PTX)
            if HAS_BLOCKS:
                at = k * RUN + run
                block_row = tl.minimum(row + i, OUTPUTS - 1) // _SCALE_BLOCK
                blocks = scales + (expert * (2 * OUTPUTS // _SCALE_BLOCK) + block_row) * SCALE_COLUMNS
                blocks += at // _EIGHTS_OF_BLOCK
                gate_sums *= x_factors[k] * tl.load(blocks, at < EIGHTS, 0.0)
                up_sums *= x_factors[k] * tl.load(blocks + UP_BLOCKS, at < EIGHTS, 0.0)
            gate_acc += gate_sums
            up_acc += up_sums
        gate, up = tl.sum(gate_acc, 0) * token_scale, tl.sum(up_acc, 0) * token_scale
        if row + i < OUTPUTS:
            if not HAS_BLOCKS:
                gate *= gate_scales[i]
                up *= up_scales[i]
            product = gate / (1.0 + tl.exp(-gate)) * up
            at_output = output + pair.to(tl.int64) * OUTPUTS + row + i
            tl.store(at_output, product.to(output.dtype.element_ty))


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
    TOP_K_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PRELOAD: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute ROWS adjacent outputs of one token: the sum of its experts' outputs times their routing weights.

    Grid: (runs of ROWS outputs, tokens), as ``down_gemv_kernel``. Like there, a tile has a line of each expert; here they
    are its columns, see ``arange_for_x8``. A program that quantizes its token's intermediate values loads all of its
    weights first.

    x                   [tokens, TOP_K, INPUTS], contiguous: FP8, or for a single pair float16, divided by
                        ``FP16_DOWNSCALE``; with QUANTIZE, and never with HAS_BLOCKS, bfloat16 or float16
    weight              FP8 [EXPERTS, OUTPUTS, INPUTS]; INPUTS is a multiple of 8
    x_scales            float32 [pairs, 1], or [pairs, INPUTS / 128] with HAS_BLOCKS; pairs are ``token_stride`` apart
                        and groups ``group_stride``; not read with QUANTIZE
    scales              float32 [EXPERTS, OUTPUTS], or [EXPERTS, OUTPUTS / 128, INPUTS / 128] with HAS_BLOCKS
    topk_weights        float32 [tokens, TOP_K]
    topk_ids            int32 [tokens, TOP_K]; the local experts are EXPERTS from ``first_expert`` on, others count 0
    output              [tokens, OUTPUTS], written, in the type of the model
    TOP_K_BLOCK         TOP_K rounded up to a power of two
    COLUMNS             columns of one iteration; with HAS_BLOCKS a multiple of 128
    PRELOAD             whether the weights are loaded before the kernel ahead has ended: only with QUANTIZE, and behind
                        ``fp8_gate_up_gemv_kernel``, whose programs have all waited for the routing when this one starts
    """
    if not PRELOAD:
        wait_for_dependencies(PDL)
    launch_dependents(PDL)
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS
    EIGHTS: tl.constexpr = INPUTS // _EIGHT
    RUN: tl.constexpr = COLUMNS // _EIGHT
    SCALE_COLUMNS: tl.constexpr = INPUTS // _SCALE_BLOCK
    DTYPE: tl.constexpr = x.dtype.element_ty
    run = arange_for_x8(RUN)[:, None]
    choice = tl.arange(0, TOP_K_BLOCK)[None, :]
    pair = token * TOP_K + choice
    is_chosen = choice < TOP_K
    # From L2: without a wait, a line of an earlier step may still be in L1.
    expert = (tl.load(topk_ids + pair, is_chosen, 0, cache_modifier=".cg") - first_expert).to(tl.int64)
    is_here = is_chosen & (expert >= 0) & (expert < EXPERTS)
    factor = tl.load(topk_weights + pair, is_chosen, 0.0, cache_modifier=".cg")
    expert_weight = (weight + expert * (OUTPUTS * INPUTS)).to(tl.pointer_type(tl.int64))
    x = (x + token.to(tl.int64) * (TOP_K * INPUTS)).to(tl.pointer_type(tl.int64))
    accs, loaded, lows, highs = no_tensors(), no_tensors(), no_tensors(), no_tensors()
    for _ in tl.static_range(ROWS):
        accs += (tl.zeros((RUN, TOP_K_BLOCK), tl.float32),)
    if QUANTIZE:
        for first in tl.static_range(0, EIGHTS, RUN):
            at = first + run
            inside = (at < EIGHTS) & is_here
            for i in tl.static_range(ROWS):
                # The last rows may not exist; what they give is not stored.
                expert_row = expert_weight + tl.minimum(row + i, OUTPUTS - 1) * EIGHTS
                loaded += (load_int64(expert_row + at, inside),)
    row_scales = no_tensors()
    if not HAS_BLOCKS:
        for i in tl.static_range(ROWS):
            at_scale = scales + expert * OUTPUTS + tl.minimum(row + i, OUTPUTS - 1)
            row_scales += (tl.load(at_scale, is_here, 0.0),)
    if PRELOAD:
        wait_for_dependencies(PDL)
    if QUANTIZE:
        for first in tl.static_range(0, EIGHTS, RUN):
            at = first + run
            low, high = load_x8(x, choice * EIGHTS + at, (at < EIGHTS) & is_here)
            lows += (low,)
            highs += (high,)
        largest = tl.zeros((RUN, TOP_K_BLOCK), tl.float32)
        for k in tl.static_range(len(lows)):
            largest = tl.maximum(largest, max_abs_x8(lows[k], highs[k], DTYPE, USE_PTX))
        pair_scale = compute_scale(tl.max(largest, 0))[None, :]
        reciprocal = tl.div_rn(1.0, pair_scale)
    elif not HAS_BLOCKS:
        pair_scale = tl.load(x_scales + pair * token_stride, is_here, 0.0)
    for first in tl.static_range(0, EIGHTS, RUN):
        at = first + run
        inside = (at < EIGHTS) & is_here
        group = at // _EIGHTS_OF_BLOCK
        if QUANTIZE:
            x_low = quantize_x4(lows[first // RUN], reciprocal, DTYPE, USE_PTX)
            x_high = quantize_x4(highs[first // RUN], reciprocal, DTYPE, USE_PTX)
        else:
            x_low, x_high = _load_x(x, choice * EIGHTS + at, inside, X_IS_FP8, USE_PTX)
            if HAS_BLOCKS:
                x_scale = tl.load(x_scales + pair * token_stride + group * group_stride, inside, 0.0)
        sums_of_rows = no_tensors()
        for i in tl.static_range(ROWS):
            at_row = tl.minimum(row + i, OUTPUTS - 1)
            if QUANTIZE:
                values = loaded[first // RUN * ROWS + i]
            else:
                values = load_int64(expert_weight + at_row * EIGHTS + at, inside)
            sums = dot_fp8x8(values, x_low, x_high, USE_PTX)
            if HAS_BLOCKS:
                block_row = expert * (OUTPUTS // _SCALE_BLOCK) + at_row // _SCALE_BLOCK
                sums *= x_scale * tl.load(scales + block_row * SCALE_COLUMNS + group, inside, 0.0)
            sums_of_rows += (accs[i] + sums,)
        accs = sums_of_rows
    if X_IS_FP8 or QUANTIZE:
        factor *= _FP16_DOWNSCALE
    if not HAS_BLOCKS:
        factor *= pair_scale
    at_output = output + token.to(tl.int64) * OUTPUTS + row
    for i in tl.static_range(ROWS):
        row_factor = factor
        if not HAS_BLOCKS:
            row_factor = factor * row_scales[i]
        total = tl.sum(accs[i] * row_factor)
        tl.store(at_output + i, total.to(output.dtype.element_ty), row + i < OUTPUTS)


def fp8_gate_up_gemv(
    x: torch.Tensor | QuantizedActivations,
    weight: torch.Tensor,
    scales: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [T * top_k, I] of x [T, H] times weight FP8 [E, 2 * I, H].

    ``x`` that is not quantized is quantized by the kernel; ``can_quantize_token`` must hold. ``scales`` are float32
    [E, 2 * I], or [E, 2 * I / 128, H / 128] for x quantized in groups. ``topk_ids`` int32 [T, top_k]: experts are those
    from ``first_expert`` on; rows of others are not written. ``tile`` replaces the tuned one.
    """
    (experts, twice, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tile = tile or tuning_for(weight.device).moe.fp8_gemv.gate_up
    output = torch.empty((tokens * top_k, twice // 2), dtype=x.dtype, device=weight.device)
    values, x_scales, options = _options(x, scales, tile, 1)
    launch(
        fp8_gate_up_gemv_kernel,
        (triton.cdiv(twice // 2, tile.rows), tokens * top_k, 1),
        (values, weight, x_scales, scales, topk_ids, output),
        (*_scale_strides(x), first_expert),
        INPUTS=inputs,
        OUTPUTS=twice // 2,
        EXPERTS=experts,
        TOP_K=top_k,
        **options,
    )
    return output


def fp8_down_gemv(
    x: torch.Tensor | QuantizedActivations,
    weight: torch.Tensor,
    scales: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    first_expert: int,
    tile: ExpertGemvTile | None = None,
) -> torch.Tensor:
    """Return the weighted sums [T, H] of x [T * top_k, I] times weight FP8 [E, H, I].

    ``x`` that is not quantized is quantized by the kernel; ``can_quantize_pairs`` must hold. ``scales`` are float32
    [E, H], or [E, H / 128, I / 128] for x quantized in groups. ``topk_weights`` float32 and ``topk_ids`` int32 are
    [T, top_k].
    """
    (experts, outputs, inputs), (tokens, top_k) = weight.shape, topk_ids.shape
    tile = tile or choose_down_tile(inputs, tuning_for(weight.device).moe.fp8_gemv)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=weight.device)
    rows = triton.next_power_of_2(top_k)
    values, x_scales, options = _options(x, scales, tile, rows)
    launch(
        fp8_down_gemv_kernel,
        (triton.cdiv(outputs, tile.rows), tokens, 1),
        (values, weight, x_scales, scales, topk_weights, topk_ids, output),
        (*_scale_strides(x), first_expert),
        INPUTS=inputs,
        OUTPUTS=outputs,
        EXPERTS=experts,
        TOP_K=top_k,
        TOP_K_BLOCK=rows,
        PRELOAD=options["QUANTIZE"] and tuning_for(weight.device).moe.fp8_gemv.preload_down,
        **options,
    )
    return output


def can_quantize_token(x: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether ``fp8_gate_up_gemv`` can quantize x [T, H]: a row is in the registers of each program."""
    return _can_quantize(x, 1, scales)


def can_quantize_pairs(inner: torch.Tensor, top_k: int, scales: torch.Tensor) -> bool:
    """Return whether ``fp8_down_gemv`` can quantize the intermediate values [T * top_k, I]."""
    return _can_quantize(inner, triton.next_power_of_2(top_k), scales)


def _can_quantize(x: torch.Tensor, rows: int, scales: torch.Tensor) -> bool:
    is_supported = scales.dim() == 2 and fused_quantize.supports(x.dtype) and x.is_contiguous()
    return is_supported and fused_quantize.choose_warps(rows * x.shape[1]) is not None


def _scale_strides(x: torch.Tensor | QuantizedActivations) -> tuple[int, ...]:
    return x.scales.stride() if isinstance(x, QuantizedActivations) else (0, 0)


def _options(
    x: torch.Tensor | QuantizedActivations, scales: torch.Tensor, tile: ExpertGemvTile, rows: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the values of x, their scales, and the options of a launch whose programs read ``rows`` rows of x."""
    has_blocks = scales.dim() == 3
    values, x_scales = (x, scales) if isinstance(x, torch.Tensor) else (x.values, x.scales)
    columns = choose_columns(values.shape[1], tile)
    if has_blocks:
        columns = max(columns, SCALE_BLOCK)
    warps = min(tile.warps, max(1, rows * columns // MIN_COLUMNS))
    if isinstance(x, torch.Tensor):
        needed = None if has_blocks else fused_quantize.choose_warps(rows * x.shape[1])
        assert needed is not None, "block FP8, or too many values for the registers of one program"
        warps = max(warps, needed)
    options = {
        "COLUMNS": columns,
        "ROWS": tile.rows,
        "HAS_BLOCKS": has_blocks,
        "X_IS_FP8": values.dtype == E4M3,
        "QUANTIZE": isinstance(x, torch.Tensor),
        "USE_PTX": supports_fp8_ptx(values.device),
        "num_warps": warps,
        **pdl_options(values.device),
    }
    return values, x_scales, options
