"""Rounding to e4m3 with one scale for each row."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8 import E4M3, LARGEST, SMALLEST_SCALE


@triton.jit
def _quantize_rows(
    values: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(values + row * stride + columns, inside, 0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), LARGEST), SMALLEST_SCALE)
    scaled = tl.div_rn(value, tl.zeros_like(value) + scale)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    tl.store(rounded + row * WIDTH + columns, scaled.to(rounded.dtype.element_ty), inside)
    tl.store(scales + row, scale)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.fp8.quantize_rows``."""
    rows, width = values.shape
    rounded = torch.empty((rows, width), dtype=E4M3, device=values.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=values.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantize_rows[(rows,)](
            values,
            rounded,
            scales,
            values.stride(0),
            WIDTH=width,
            BLOCK=block,
            LARGEST=LARGEST,
            SMALLEST_SCALE=SMALLEST_SCALE,
            num_warps=min(16, max(1, block // 512)),
        )
    return rounded, scales
