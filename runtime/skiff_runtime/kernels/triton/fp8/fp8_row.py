"""silu·mul of a single row and its rounding, by many programs in two launches: sooner done than by one program in one."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import QuantizedActivations
from skiff_runtime.kernels.triton.fp8.rounding import scale_of, store, store_scale
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_mul
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

PART = 1024
WARPS = 4
"""What a program works on, and by how many warps."""


@triton.jit
def silu_and_mul_amax_kernel(
    gate_up: tl.tensor,
    values: tl.tensor,
    largest: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    part = tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    wait_for_dependencies(PDL)
    value = silu_mul(gate_up, columns, WIDTH)
    tl.store(values + columns, value, columns < WIDTH)
    tl.store(largest + part, tl.max(tl.abs(value.to(tl.float32)), 0))


@triton.jit
def quantize_chunk_kernel(
    values: tl.tensor,
    largest: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    part = tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, PARTS_BLOCK)
    wait_for_dependencies(PDL)
    value = tl.load(values + columns, columns < WIDTH, 0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.load(largest + each, each < PARTS, 0.0), 0), bound)
    store(value, scale, rounded, 0, columns, WIDTH)
    if part == 0:
        store_scale(scale, rounded, scales, 0)


def quantize_single_row(gate_up: torch.Tensor, rounded: QuantizedActivations, bound: float) -> None:
    """As ``kernels.fp8.silu_and_mul_quantize``, of gate_up [1, 2 * width] into ``rounded`` [1, width]."""
    width = rounded.values.shape[1]
    parts = triton.cdiv(width, PART)
    values = torch.empty(width, dtype=gate_up.dtype, device=gate_up.device)
    largest = torch.empty(parts, dtype=torch.float32, device=gate_up.device)
    options = {"WIDTH": width, "BLOCK": PART, "num_warps": WARPS, **pdl_options(gate_up.device)}
    silu_and_mul_amax_kernel[(parts,)](gate_up, values, largest, **options)
    quantize_chunk_kernel[(parts,)](
        *(values, largest, rounded.values, rounded.scales, bound),
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        **options,
    )
