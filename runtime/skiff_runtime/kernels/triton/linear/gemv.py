"""GEMV: the product of one token with a weight, as fast as the weight can be read.

A program multiplies one row of the weight, or two adjacent ones, in runs of columns and adds up in float32. Many
programs read at a time, every byte of the weight is read once, and the first run of it is loaded before the kernel
ahead has ended. The two rows are kept as two vectors: as one block of two dimensions, Triton would pass the
activations through shared memory.

The product with a gated MLP's weight of gate and up has a kernel that applies SwiGLU as well: one program has a row of
gate and the same one of up, and no launch is left between this product and that of the down-projection.

From two tokens on, the GPU's library reads weights at nearly the rate of copies.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.norm_act.silu_and_mul import multiply_by_silu
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    launch_dependents_if,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import GemvTile, tuning_for

WEIGHT_EVICTION = tl.constexpr("evict_first")
"""Eviction policy of the weight's cache lines: a step reads each of them once, and activations many times."""


@triton.jit
def gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with one row of the weight, or with two adjacent ones.

    Grid: (rows of the weight, or with PAIR pairs of them). Products are added by explicit FMAs, so that the order of a
    row's sum follows from COLUMNS and the warps alone: which of two products the compiler would round before it adds
    them depends on the rest of the kernel.

    x                   [INPUTS], contiguous
    weight              [outputs, INPUTS], rows ``weight_stride`` apart
    bias                [outputs]; not read without HAS_BIAS
    output              [outputs], written
    COLUMNS             columns of one iteration
    LATE                whether the kernel behind starts only when those ahead have ended, so that it may read x before
                        it waits itself: then the first program lets it start behind its own wait
    """
    if LATE:
        launch_dependents_if(tl.program_id(0) > 0, PDL)
    else:
        launch_dependents(PDL)
    row = tl.program_id(0) * 2 if PAIR else tl.program_id(0)
    other = tl.minimum(row + 1, outputs - 1)
    added = tl.load(bias + row).to(tl.float32) if HAS_BIAS else 0.0
    if PAIR:
        other_added = tl.load(bias + other).to(tl.float32) if HAS_BIAS else 0.0
    source = weight + row.to(tl.int64) * weight_stride
    other_source = weight + other.to(tl.int64) * weight_stride
    first_weights = load_first_columns(source, other_source, INPUTS, PAIR, COLUMNS)
    wait_for_dependencies(PDL)
    if LATE:
        launch_dependents_if(tl.program_id(0) == 0, PDL)
    product, other_product = multiply_rows(x, source, other_source, first_weights, INPUTS, PAIR, COLUMNS)
    dtype = output.dtype.element_ty
    tl.store(output + row, (product + added).to(dtype))
    if PAIR:
        tl.store(output + row + 1, (other_product + other_added).to(dtype), row + 1 < outputs)


@triton.jit
def load_weights(pointers: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return a run of a weight's row in float32, with zeros outside of it."""
    return tl.load(pointers, inside, 0.0, eviction_policy=WEIGHT_EVICTION).to(tl.float32)


@triton.jit
def load_first_columns(
    source: tl.tensor,
    other_source: tl.tensor,
    INPUTS: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return a tuple of the first COLUMNS weights of a row, and with PAIR of another one, in float32."""
    run = tl.arange(0, COLUMNS)
    inside = run < INPUTS
    weights: tl.tuple = (load_weights(source + run, inside),)
    if PAIR:
        weights = weights + (load_weights(other_source + run, inside),)  # noqa: RUF005
    return weights


@triton.jit
def multiply_rows(
    x: tl.tensor,
    source: tl.tensor,
    other_source: tl.tensor,
    first_weights: tl.tensor,
    INPUTS: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return, in float32, the products of a token with a row and, with PAIR, with another one; else the first one twice.

    ``first_weights`` is what ``load_first_columns`` has returned for both.
    """
    run = tl.arange(0, COLUMNS)
    x_values = tl.load(x + run, run < INPUTS, 0.0).to(tl.float32)
    zeros = tl.zeros((COLUMNS,), tl.float32)
    acc = tl.fma(x_values, first_weights[0], zeros)
    if PAIR:
        other_acc = tl.fma(x_values, first_weights[1], zeros)
    for first in range(COLUMNS, INPUTS, COLUMNS):
        column = first + run
        inside = column < INPUTS
        x_values = tl.load(x + column, inside, 0.0).to(tl.float32)
        acc = tl.fma(x_values, load_weights(source + column, inside), acc)
        if PAIR:
            other_weights = load_weights(other_source + column, inside)
            other_acc = tl.fma(x_values, other_weights, other_acc)
    product = tl.sum(acc, 0)
    other_product = tl.sum(other_acc, 0) if PAIR else product
    return product, other_product


@triton.jit
def gemv_silu_and_mul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with one row of gate and the same one of up; store silu(gate) * up.

    Grid: (outputs). The sum of each row is that of ``gemv_kernel`` with the same COLUMNS and warps, whichever row is
    beside it there, and is rounded as ``gemv_kernel`` stores it: the result has the bits of ``gemv_kernel`` followed by
    ``silu_and_mul_kernel``.

    x                   [INPUTS], contiguous
    weight              [2 * outputs, INPUTS], rows ``weight_stride`` apart: those of gate, then those of up
    bias                [2 * outputs]; not read without HAS_BIAS
    output              [outputs], written
    COLUMNS             columns of one iteration
    """
    launch_dependents(PDL)
    row = tl.program_id(0)
    up_row = row + outputs
    run = tl.arange(0, COLUMNS)
    inside = run < INPUTS
    gate_source = weight + row.to(tl.int64) * weight_stride
    up_source = weight + up_row.to(tl.int64) * weight_stride
    first_gate_weights = load_weights(gate_source + run, inside)
    first_up_weights = load_weights(up_source + run, inside)
    gate_added = tl.load(bias + row).to(tl.float32) if HAS_BIAS else 0.0
    up_added = tl.load(bias + up_row).to(tl.float32) if HAS_BIAS else 0.0
    wait_for_dependencies(PDL)
    x_values = tl.load(x + run, inside, 0.0).to(tl.float32)
    zeros = tl.zeros((COLUMNS,), tl.float32)
    gate_acc = tl.fma(x_values, first_gate_weights, zeros)
    up_acc = tl.fma(x_values, first_up_weights, zeros)
    for first in range(COLUMNS, INPUTS, COLUMNS):
        column = first + run
        inside = column < INPUTS
        x_values = tl.load(x + column, inside, 0.0).to(tl.float32)
        gate_acc = tl.fma(x_values, load_weights(gate_source + column, inside), gate_acc)
        up_acc = tl.fma(x_values, load_weights(up_source + column, inside), up_acc)
    dtype = output.dtype.element_ty
    gate = (tl.sum(gate_acc, 0) + gate_added).to(dtype).to(tl.float32)
    up = (tl.sum(up_acc, 0) + up_added).to(dtype).to(tl.float32)
    tl.store(output + row, multiply_by_silu(gate, up, dtype))


def is_profitable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether ``gemv`` is faster at this product than the library."""
    return x.shape[0] == 1 and weight.shape[0] <= tuning_for(x.device).gemv.max_outputs


def is_fusion_profitable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether ``gemv_silu_and_mul`` is faster than the product followed by ``silu_and_mul``."""
    return tuning_for(x.device).gemv.fuse_silu_and_mul and is_profitable(x, weight)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: GemvTile | None = None,
    dtype: torch.dtype | None = None,
    late: bool = False,
) -> torch.Tensor:
    """Return x [1, inputs] times weight [outputs, inputs] plus bias [outputs]: [1, outputs].

    ``tile`` replaces the tuned one; ``dtype`` is that of the result (default: that of x). ``late``: the kernel behind may
    read x before it waits for this one.
    """
    inputs, outputs = x.shape[1], weight.shape[0]
    output = torch.empty((1, outputs), dtype=dtype or x.dtype, device=x.device)
    tile = tile or _choose_tile(weight)
    gemv_kernel[(triton.cdiv(outputs, 2 if tile.pair else 1),)](
        x,
        weight,
        weight if bias is None else bias,
        output,
        weight.stride(0),
        outputs,
        INPUTS=inputs,
        PAIR=tile.pair,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        LATE=late,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return output


def gemv_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [1, n] of x [1, inputs] times weight [2 * n, inputs] plus bias [2 * n]: gate, then up.

    The result has the bits of ``gemv`` with the same ``tile``, which replaces the tuned one, and ``silu_and_mul``.
    """
    inputs, outputs = x.shape[1], weight.shape[0] // 2
    output = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tile = tile or _choose_tile(weight, fused=True)
    gemv_silu_and_mul_kernel[(outputs,)](
        *(x, weight, weight if bias is None else bias, output, weight.stride(0), outputs),
        INPUTS=inputs,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return output


def _choose_tile(weight: torch.Tensor, *, fused: bool = False) -> GemvTile:
    """``fused``: with SwiGLU."""
    tuning, inputs = tuning_for(weight.device).gemv, weight.shape[1]
    if inputs <= tuning.short_inputs or inputs > tuning.long_inputs:
        return tuning.edge_tile
    # Half a run at the end of each row would be loaded for nothing.
    if inputs % tuning.tile.columns == 0:
        return tuning.tile
    return tuning.uneven_silu_tile if fused else tuning.uneven_tile
