"""SwiGLU's product: silu of the gates times the factors."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK: Final = 1024
"""Elements of a row that one program computes; not compared with others."""


@triton.jit
def silu_and_mul_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one block of one row.

    Grid: (rows, blocks of BLOCK elements).

    gate_up             [rows, 2 * WIDTH], rows ``stride`` apart: gates, then the factors
    output              [rows, WIDTH], written
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = load_silu_and_mul(gate_up + row * stride, columns, WIDTH)
    tl.store(output + row * WIDTH + columns, value, columns < WIDTH)


@triton.jit
def load_silu_and_mul(row: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the product at ``columns`` of a row of WIDTH gates and WIDTH factors; 0 from WIDTH on."""
    inside = columns < WIDTH
    dtype = row.dtype.element_ty
    gate = tl.load(row + columns, inside, 0.0).to(tl.float32)
    up = tl.load(row + WIDTH + columns, inside, 0.0).to(tl.float32)
    return multiply_by_silu(gate, up, dtype)


@triton.jit
def multiply_by_silu(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return silu(gate) * up of float32 values in ``dtype``, to which silu(gate) is rounded as well."""
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (active * up).to(dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Do what ``kernels.activation.silu_and_mul`` does."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        silu_and_mul_kernel[grid](
            gate_up,
            output,
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(gate_up.device),
        )
    return output
