"""RMS normalization of rows, with or without the sum before it."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if SUM:
        value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, rounded, inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    scaled = (value * scale).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * WIDTH + columns, (scaled * weights).to(normed.dtype.element_ty), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``kernels.norm.rms_norm`` of x [T, n] with a weight [n]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, normed, normed, eps, summed=False)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.norm.add_rms_norm``."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, normed, total, eps, summed=True)
    return normed, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    summed: bool,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        SUM=summed,
        num_warps=min(16, max(1, block // 512)),
        **pdl_options(x.device),
    )
