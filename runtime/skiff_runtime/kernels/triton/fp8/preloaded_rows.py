"""Parts of FP8 GEMVs that load all rows of a program before the kernel ahead has ended.

What a program holds, whole rows of the weight and the token, is cut into runs of RUN eights: a tuple has one tensor [RUN]
of int64 for each run, which is eight FP8 numbers of a row, or four two-byte numbers of the token. The last run may reach
beyond the row; there are zeros.
"""

import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP16_DOWNSCALE
from skiff_runtime.kernels.triton.fp8.dequantize import dot_fp8x8
from skiff_runtime.kernels.triton.fp8.fused_quantize import (
    arange_for_x8,
    load_int64,
    load_x8,
    max_abs_x8,
    quantize_x4,
)
from skiff_runtime.kernels.triton.fp8.quantize import compute_scale
from skiff_runtime.kernels.triton.runtime.tensor_tuples import no_tensors

_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)


@triton.jit
def load_rows(
    weight: tl.tensor, weight_stride: tl.tensor, rows: tl.tuple, EIGHTS: tl.constexpr, RUN: tl.constexpr
) -> tl.tuple:
    """Load the numbered rows of a weight, of EIGHTS int64 each: the first run of each row, then the second of each."""
    loaded = no_tensors()
    for first in tl.static_range(0, EIGHTS, RUN):
        at = first + arange_for_x8(RUN)
        inside = None if EIGHTS % RUN == 0 else at < EIGHTS
        for i in tl.static_range(len(rows)):
            source = (weight + rows[i].to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int64))
            loaded += (load_int64(source + at, inside),)
    return loaded


@triton.jit
def load_token(x: tl.tensor, EIGHTS: tl.constexpr, RUN: tl.constexpr) -> tuple[tl.tuple, tl.tuple]:
    """Load a token of EIGHTS * 8 two-byte numbers: (the first four, the last four) of its eights, run by run."""
    lows, highs = no_tensors(), no_tensors()
    for first in tl.static_range(0, EIGHTS, RUN):
        at = first + arange_for_x8(RUN)
        inside = None if EIGHTS % RUN == 0 else at < EIGHTS
        low, high = load_x8(x.to(tl.pointer_type(tl.int64)), at, inside)
        lows += (low,)
        highs += (high,)
    return lows, highs


@triton.jit
def quantize_token(
    lows: tl.tuple, highs: tl.tuple, bound: tl.tensor, DTYPE: tl.constexpr, USE_PTX: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor]:
    """Quantize a token of type ``DTYPE``: its float16 numbers, as ``dot_rows`` takes them, and their scale, float32.

    Magnitudes beyond ``bound`` become the bound.
    """
    largest = tl.zeros(lows[0].shape, tl.float32)
    for k in tl.static_range(len(lows)):
        largest = tl.maximum(largest, max_abs_x8(lows[k], highs[k], DTYPE, USE_PTX))
    scale = compute_scale(tl.minimum(tl.max(largest, 0), bound))
    reciprocal = tl.div_rn(1.0, scale)
    quantized_lows, quantized_highs = no_tensors(), no_tensors()
    for k in tl.static_range(len(lows)):
        quantized_lows += (quantize_x4(lows[k], reciprocal, DTYPE, USE_PTX),)
        quantized_highs += (quantize_x4(highs[k], reciprocal, DTYPE, USE_PTX),)
    return quantized_lows, quantized_highs, scale * _FP16_DOWNSCALE


@triton.jit
def dot_rows(
    loaded: tl.tuple, lows: tl.tuple, highs: tl.tuple, ROWS: tl.constexpr, USE_PTX: tl.constexpr
) -> tl.tuple:
    """Multiply ROWS rows, as ``load_rows`` gives them, with a token: for each row float32 [RUN], sums over its runs."""
    sums = no_tensors()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros(lows[0].shape, tl.float32),)
    for k in tl.static_range(len(lows)):
        new_sums = no_tensors()
        for i in tl.static_range(ROWS):
            new_sums += (sums[i] + dot_fp8x8(loaded[k * ROWS + i], lows[k], highs[k], USE_PTX),)
        sums = new_sums
    return sums
