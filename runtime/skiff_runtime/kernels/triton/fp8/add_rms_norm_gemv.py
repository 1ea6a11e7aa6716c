"""FP8 GEMV with the residual addition, the RMSNorm and the quantization of its token in the same launch.

A launch for the norm of one token is the work of a single program, which costs about 1.3 µs a layer and reads next to
nothing. Here every program of the GEMV adds and normalizes the whole token again, in registers, while its rows of the weight
are on their way. So it has more rows than a program that finds its token quantized: the more rows, the fewer programs do
the same work.

The sum is rounded to bfloat16, the norm before and after its weight, and the quantized token to FP8, as in
``add_rms_norm_quantize_kernel``; but squares are added up in another order, so the norm may differ by a rounding.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP8Weight
from skiff_runtime.kernels.triton.fp8.dequantize import supports_fp8_ptx
from skiff_runtime.kernels.triton.fp8.fused_quantize import UNPACK_BF16_PTX, arange_for_x8
from skiff_runtime.kernels.triton.fp8.preloaded_rows import dot_rows, load_rows, load_token, quantize_token
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors
from skiff_runtime.kernels.tuning import NormGemvTile, tuning_for

COLUMNS_PER_WARP: Final = 512
"""Of a run; two eights a thread."""
MAX_WARPS: Final = 8
# Ada has FP8, but no bfloat16 sum and product: 1 * a + b, and a * b - 0, have the same bits.
_ADD_PTX = tl.constexpr(
    """
        {
        .reg .b32 a, b, c, d, one;
        .reg .f32 v0, v1, v2, v3;
        mov.b64 {a, b}, $2;
        mov.b64 {c, d}, $3;
        mov.b32 one, 0x3f803f80;
        fma.rn.bf16x2 a, a, one, c;
        fma.rn.bf16x2 b, b, one, d;
        mov.b64 $0, {a, b};
        """
    + UNPACK_BF16_PTX
    + """
        mul.rn.f32 v0, v0, v0;
        fma.rn.f32 v0, v1, v1, v0;
        mul.rn.f32 v2, v2, v2;
        fma.rn.f32 v2, v3, v3, v2;
        add.rn.f32 $1, v0, v2;
        }
        """
)
_NORMALIZE_PTX = tl.constexpr(
    """
        {
        .reg .b32 a, b, c, d, zero;
        .reg .f32 v0, v1, v2, v3;
        mov.b64 {a, b}, $1;
        """
    + UNPACK_BF16_PTX
    + """
        mul.rn.f32 v0, v0, $3;
        mul.rn.f32 v1, v1, $3;
        mul.rn.f32 v2, v2, $3;
        mul.rn.f32 v3, v3, $3;
        cvt.rn.bf16x2.f32 a, v1, v0;
        cvt.rn.bf16x2.f32 b, v3, v2;
        mov.b64 {c, d}, $2;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 a, a, c, zero;
        fma.rn.bf16x2 b, b, d, zero;
        mov.b64 $0, {a, b};
        }
        """
)


@triton.jit
def add_rms_norm_fp8_gemv_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    eps: tl.tensor,
    bound: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply the norm of one token's sum, quantized, with ROWS adjacent rows of the weight.

    Grid: (runs of ROWS outputs). Everything but the token is loaded before the kernel ahead has ended.

    x, residual         bfloat16 [INPUTS]
    norm_weight         bfloat16 [INPUTS]
    weight              FP8 [outputs, INPUTS], rows ``weight_stride`` apart; INPUTS is a multiple of 8
    scales              float32 [outputs]
    bias                bfloat16 [outputs]; not read without HAS_BIAS
    total               bfloat16 [INPUTS], written by the first program: the sum of x and residual
    output              bfloat16 [outputs], written
    eps                 float, of the norm
    bound               float: larger magnitudes of the norm become it; inf for none
    """
    launch_dependents(PDL)
    EIGHTS: tl.constexpr = INPUTS // 8
    RUN: tl.constexpr = COLUMNS // 8
    first_row = tl.program_id(0) * ROWS
    rows = no_tensors()
    for i in tl.static_range(ROWS):
        # The last rows may not exist; what they give is not stored.
        rows += (tl.minimum(first_row + i, outputs - 1),)
    loaded = load_rows(weight, weight_stride, rows, EIGHTS, RUN)
    norm_lows, norm_highs = load_token(norm_weight, EIGHTS, RUN)
    all_rows = first_row + tl.arange(0, ROWS)
    is_output = all_rows < outputs
    row_scales = tl.load(scales + all_rows, is_output, 0.0)
    if HAS_BIAS:
        biases = tl.load(bias + all_rows, is_output, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    x_lows, x_highs = load_token(x, EIGHTS, RUN)
    residual_lows, residual_highs = load_token(residual, EIGHTS, RUN)
    lows, highs = no_tensors(), no_tensors()
    squares = tl.zeros((RUN,), tl.float32)
    for k in tl.static_range(len(x_lows)):
        low, low_squares = add_x4(x_lows[k], residual_lows[k], USE_PTX)
        high, high_squares = add_x4(x_highs[k], residual_highs[k], USE_PTX)
        squares += low_squares + high_squares
        lows += (low,)
        highs += (high,)
    norm_scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    normed_lows, normed_highs = no_tensors(), no_tensors()
    for k in tl.static_range(len(lows)):
        normed_lows += (normalize_x4(lows[k], norm_lows[k], norm_scale, USE_PTX),)
        normed_highs += (normalize_x4(highs[k], norm_highs[k], norm_scale, USE_PTX),)
    quantized_lows, quantized_highs, scale = quantize_token(
        normed_lows, normed_highs, bound, tl.bfloat16, USE_PTX
    )
    sums = dot_rows(loaded, quantized_lows, quantized_highs, ROWS, USE_PTX)
    # All rows are added up over the threads together, which takes half as many exchanges between them as one by one.
    products = tl.sum(stack(sums, RUN, ROWS), 0) * (scale * row_scales)
    if HAS_BIAS:
        products += biases
    tl.store(output + all_rows, products.to(output.dtype.element_ty), is_output)
    if tl.program_id(0) == 0:
        fours = total.to(tl.pointer_type(tl.int64))
        for k in tl.static_range(len(lows)):
            at = k * RUN + arange_for_x8(RUN)
            tl.store(fours + 2 * at, lows[k], at < EIGHTS)
            tl.store(fours + 2 * at + 1, highs[k], at < EIGHTS)


@triton.jit
def add_x4(x: tl.tensor, residual: tl.tensor, USE_PTX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Add the four bfloat16 numbers in each int64; return the sums, rounded, and float32, the sum of their squares."""
    if USE_PTX:
        total, squares = tl.inline_asm_elementwise(
            _ADD_PTX,
            "=l,=f,l,l",
            [x, residual],
            dtype=(tl.int64, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.zeros_like(x)
        squares = tl.zeros(x.shape, tl.float32)
        for i in tl.static_range(4):
            rounded = (_unpack(x, i) + _unpack(residual, i)).to(tl.bfloat16)
            value = rounded.to(tl.float32)
            squares += value * value
            total |= _pack(rounded, i)
    return total, squares


@triton.jit
def normalize_x4(x: tl.tensor, weight: tl.tensor, norm_scale: tl.tensor, USE_PTX: tl.constexpr) -> tl.tensor:
    """Multiply the four bfloat16 numbers in each int64 by ``norm_scale``, float32, and by those of ``weight``; round twice."""
    if USE_PTX:
        normed = tl.inline_asm_elementwise(
            _NORMALIZE_PTX,
            "=l,l,l,f",
            [x, weight, norm_scale],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        normed = tl.zeros_like(x)
        for i in tl.static_range(4):
            value = (_unpack(x, i) * norm_scale).to(tl.bfloat16).to(tl.float32)
            normed |= _pack((value * _unpack(weight, i)).to(tl.bfloat16), i)
    return normed


@triton.jit
def _unpack(packed: tl.tensor, i: tl.constexpr) -> tl.tensor:
    """Return number ``i`` of the four bfloat16 in each int64, as float32."""
    return (packed >> (16 * i)).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _pack(value: tl.tensor, i: tl.constexpr) -> tl.tensor:
    """Return an int64 with the bfloat16 ``value`` as number ``i`` of four, and zeros."""
    return value.to(tl.uint16, bitcast=True).to(tl.int64) << (16 * i)


@triton.jit
def stack(tensors: tl.tuple, RUN: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Return NUMBER tensors [RUN], a power of two and at least two, as one [RUN, NUMBER]."""
    if NUMBER == 2:
        stacked = tl.join(tensors[0], tensors[1])
    else:
        evens, odds = no_tensors(), no_tensors()
        for i in tl.static_range(NUMBER // 2):
            evens += (tensors[2 * i],)
            odds += (tensors[2 * i + 1],)
        joined = tl.join(stack(evens, RUN, NUMBER // 2), stack(odds, RUN, NUMBER // 2))
        stacked = tl.reshape(joined, (RUN, NUMBER))
    return stacked


def add_rms_norm_fp8_gemv(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: FP8Weight,
    bias: torch.Tensor | None,
    bound: float,
    *,
    tile: NormGemvTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the product with a weight [outputs, inputs], plus bias [outputs]; the sum of x and residual, both [1, inputs]).

    The product is that of ``add_rms_norm_quantize`` of x, residual and ``norm_weight`` [inputs]. ``tile`` replaces the tuned
    one. ``supports`` must hold.
    """
    (outputs, inputs), device = weight.values.shape, x.device
    tile = tile or tuning_for(device).fp8_gemv.norm_tile
    warps = _choose_warps(inputs, tile)
    assert warps <= MAX_WARPS, "too many inputs for the registers of one program"
    output = torch.empty((1, outputs), dtype=x.dtype, device=device)
    total = torch.empty_like(x)
    add_rms_norm_fp8_gemv_kernel[(triton.cdiv(outputs, tile.rows),)](
        *(x, residual, norm_weight, weight.values, weight.scales, weight.scales if bias is None else bias),
        *(total, output, weight.values.stride(0), outputs, eps, bound),
        INPUTS=inputs,
        COLUMNS=min(COLUMNS_PER_WARP * warps, triton.next_power_of_2(inputs)),
        ROWS=tile.rows,
        HAS_BIAS=bias is not None,
        USE_PTX=supports_fp8_ptx(device),
        num_warps=warps,
        **pdl_options(device),
    )
    return output, total


def supports(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Return whether ``add_rms_norm_fp8_gemv`` takes x and a residual [T, inputs], if a program can hold a token."""
    return len(x) == 1 and x.dtype == torch.bfloat16 and x.is_contiguous() and residual.is_contiguous()


def is_fusion_profitable(weight: FP8Weight) -> bool:
    """Return whether one launch is faster than a norm that quantizes its token, and the GEMV behind it."""
    tuning = tuning_for(weight.values.device).fp8_gemv
    if weight.values.numel() > tuning.max_normed_weights:
        return False
    return _choose_warps(weight.values.shape[1], tuning.norm_tile) <= MAX_WARPS


def _choose_warps(inputs: int, tile: NormGemvTile) -> int:
    warps: int = triton.next_power_of_2(triton.cdiv(inputs, tile.inputs_per_warp))
    return warps
