"""RMSNorm of rows, with or without the addition of a residual before it."""

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
    other: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Normalize one row, held in registers; with ADD, after adding the residual.

    Grid: (rows). The weight, which no kernel writes, is loaded before the kernel ahead has ended.

    x, residual         [rows, WIDTH], rows ``x_stride`` and ``residual_stride`` apart; the residual is not read
                        without ADD
    other               [rows, WIDTH], added to x first, and the sum rounded; only read with ADD_OTHER
    weight              [WIDTH]
    normed              [rows, WIDTH], written
    total               [rows, WIDTH], written with ADD: the sum, in the type of the model
    eps                 float
    BLOCK               WIDTH rounded up to a power of two
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    wait_for_dependencies(PDL)
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if ADD_OTHER:
        value += tl.load(other + row * WIDTH + columns, inside, 0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, inside, 0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, rounded, inside)
        value = rounded.to(tl.float32)
    result = normalize_row(value, weights, eps, WIDTH, normed.dtype.element_ty)
    tl.store(normed + row * WIDTH + columns, result, inside)


@triton.jit
def normalize_row(
    value: tl.tensor, weights: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return the RMSNorm, in ``DTYPE``, of a whole row and its weights, both float32 and 0 behind WIDTH.

    The normalized row is rounded before it is multiplied by the weight, as the reference rounds it.
    """
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    scaled = (value * scale).to(DTYPE).to(tl.float32)
    return (scaled * weights).to(DTYPE)


def row_warps(width: int) -> int:
    """Return the warps of a program that holds a row of ``width`` elements."""
    warps: int = min(16, max(1, triton.next_power_of_2(width) // 512))
    return warps


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do what ``kernels.rms_norm.rms_norm`` does, for x [T, n] and a weight [n]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, x, weight, normed, normed, eps, add=False)
    return normed


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    other: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``kernels.rms_norm.add_rms_norm`` does."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, other, residual, weight, normed, total, eps, add=True)
    return normed, total


def _launch(
    x: torch.Tensor,
    other: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    rms_norm_kernel[(rows,)](
        x,
        x if other is None else other,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD_OTHER=other is not None,
        ADD=add,
        num_warps=row_warps(width),
        **pdl_options(x.device),
    )
