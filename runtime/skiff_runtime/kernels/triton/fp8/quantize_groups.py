"""FP8 quantization of activations in groups of 128 elements of a token, for block FP8 (DeepSeek-V3, 2024)."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP16_DOWNSCALE,
    MIN_SCALE,
    QuantizedActivations,
)
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

GROUP: Final = 128
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


@triton.jit(do_not_specialize=["rows"])
def quantize_groups_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Quantize one group of one row.

    Grid: (rows, groups), one warp each.

    x                   [rows, WIDTH], rows ``stride`` apart
    values              FP8, or float16 for a single row, [rows, WIDTH], written
    scales              float32 [groups, rows], written
    """
    launch_dependents(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * stride + column, column < WIDTH, 0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), _FP8_MAX), _MIN_SCALE)
    scaled = value * tl.div_rn(1.0, scale)
    quantized = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)
    if values.dtype.element_ty == tl.float16:
        quantized = (quantized.to(tl.float32) / _FP16_DOWNSCALE).to(tl.float16)
        scale = scale * _FP16_DOWNSCALE
    tl.store(values + row * WIDTH + column, quantized, column < WIDTH)
    tl.store(scales + group * rows + row, scale)


def quantize_groups(x: torch.Tensor) -> QuantizedActivations:
    """Quantize x [T, n] with one scale for each 128 elements of a token: scales [T, groups], tokens side by side."""
    rows, width = x.shape
    values = torch.empty((rows, width), dtype=torch.float16 if rows == 1 else E4M3, device=x.device)
    scales = torch.empty((triton.cdiv(width, GROUP), rows), dtype=torch.float32, device=x.device)
    if rows:
        quantize_groups_kernel[(rows, len(scales))](
            *(x, values, scales, rows, x.stride(0)),
            WIDTH=width,
            GROUP=GROUP,
            num_warps=1,
            **pdl_options(x.device),
        )
    return QuantizedActivations(values, scales.T, x.dtype)
