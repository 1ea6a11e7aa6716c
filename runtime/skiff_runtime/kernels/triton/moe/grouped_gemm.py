"""Grouped GEMM: the products of many tokens with the experts that they were routed to.

The rows of a product are pairs of a token and an expert, sorted by expert and cut into row blocks of one expert each
(``moe_align_block_size``). Gate and up are one launch: a program computes the same columns of both, so SiLU and the
product are its epilogue, and what is written is the input of the down-projection. That multiplies each pair's row by
the routing weight and writes it to a row of its own; ``moe_sum`` adds the rows of a token up.

Invariant: a row depends on its token, its expert and the tile alone, not on the rows beside it, and no sum is made by
atomics; so a step gives the same bits each time. Grids are sized for the most row blocks that can be, and the programs
beyond those in use return at once.

With few tokens the time is that of reading the weights. Then the tensor cores' first operand, of 64 rows, may be the
weights, and the tokens the second (SWAP).
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.moe.moe_align_block_size import SortedPairs
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    CACHE_LINE_BYTES,
    launch_dependents,
    pdl_options,
    prefetch,
    wait_for_dependencies,
)
from skiff_runtime.kernels.tuning import GroupedGemmTile

NO_SCALES: Final = tl.constexpr(0)
CHANNEL_SCALES: Final = tl.constexpr(1)
"""One scale for each row of x and for each output. FP8 products of all inputs are then added up inside the tensor cores,
which keep fewer bits of a sum than float32 has; the products of dense layers accept the same (fast accumulation)."""
BLOCK_SCALES: Final = tl.constexpr(2)
"""One scale for each row of x and 128 inputs, and for each 128 outputs and 128 inputs."""
SCALE_BLOCK: Final = tl.constexpr(128)


@triton.jit
def _locate_block(
    used: tl.tensor, COLUMN_BLOCKS: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (row block, column block) of this program: the row blocks of a group take turns at each column block."""
    program = tl.program_id(0)
    first = program // (GROUP * COLUMN_BLOCKS) * GROUP
    size = tl.maximum(tl.minimum(used - first, GROUP), 1)
    within = program % (GROUP * COLUMN_BLOCKS)
    return first + within % size, within // size


@triton.jit
def _along_rows(value: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    """Broadcast a vector of rows of x to the shape of a tile of the product."""
    return value[None, :] if SWAP else value[:, None]


@triton.jit
def _along_outputs(value: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    """Broadcast a vector of outputs to the shape of a tile of the product."""
    return value[:, None] if SWAP else value[None, :]


@triton.jit
def _zeros(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SWAP: tl.constexpr) -> tl.tensor:
    """Return a tile of the product, [ROWS, OUTPUTS], or with SWAP [OUTPUTS, ROWS]."""
    return tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)


@triton.jit
def _load_block(
    pointers: tl.tensor,
    rows_inside: tl.tensor,
    columns_inside: tl.tensor,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Load a block [rows, columns] with the masks that its sizes need; 0 outside."""
    if MASK_ROWS and MASK_COLUMNS:
        block = tl.load(pointers, rows_inside[:, None] & columns_inside[None, :], 0.0)
    elif MASK_ROWS:
        block = tl.load(pointers, rows_inside[:, None], 0.0)
    elif MASK_COLUMNS:
        block = tl.load(pointers, columns_inside[None, :], 0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def _multiply(
    acc: tl.tensor, x: tl.tensor, weight: tl.tensor, SWAP: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Add x [rows, inputs] times weight [outputs, inputs] to a tile of the product."""
    # No early return: the compiler reads on behind it, where shapes would not fit.
    if SWAP:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["pairs", "token_stride", "group_stride"])
def gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    pair_ids: tl.tensor,
    expert_ids: tl.tensor,
    num_blocks: tl.tensor,
    output: tl.tensor,
    pairs: tl.tensor,
    x_stride: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute silu(gate) * up of one row block, for OUTPUTS_BLOCK columns.

    Grid: (most row blocks * column blocks). The gathered rows of x and the weights of gate and of up are loaded
    INPUTS_BLOCK columns at a time. The kernel behind starts only when all programs of this one have waited, so it may
    read the sorted pairs before it waits itself.

    x                   [tokens, INPUTS], rows ``x_stride`` apart, in the type of the weights
    weight              [experts, 2 * OUTPUTS, INPUTS]: of each expert the rows of gate, then those of up
    x_scales            float32 [tokens, 1] with CHANNEL_SCALES, [tokens, INPUTS / 128] with BLOCK_SCALES, else not
                        read; tokens are ``token_stride`` apart and groups ``group_stride``
    scales              float32 [experts, 2 * OUTPUTS] with CHANNEL_SCALES, [experts, 2 * OUTPUTS / 128, INPUTS / 128]
                        with BLOCK_SCALES, else not read
    pair_ids            int32 [blocks, ROWS_BLOCK], ``pairs`` in rows without a pair; pair p is of token p // TOP_K
    expert_ids          int32 [blocks]
    num_blocks          int32 [1]: the row blocks in use
    output              [pairs, OUTPUTS], written, in the type of the model; rows of other ranks' experts are not
    SWAP                whether the weights are the first operand of the tensor cores
    STAGES              of the software pipeline
    """
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    COLUMN_BLOCKS: tl.constexpr = (OUTPUTS + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    MASK_OUTPUTS: tl.constexpr = OUTPUTS % OUTPUTS_BLOCK != 0
    MASK_INPUTS: tl.constexpr = INPUTS % INPUTS_BLOCK != 0
    used = tl.load(num_blocks)
    if tl.program_id(0) >= used * COLUMN_BLOCKS:
        return
    block, column_block = _locate_block(used, COLUMN_BLOCKS, GROUP)
    pair = tl.load(pair_ids + block * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK))
    is_pair = pair < pairs
    token = pair // TOP_K
    expert = tl.load(expert_ids + block).to(tl.int64)
    gate = column_block * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    is_output = gate < OUTPUTS
    column = tl.arange(0, INPUTS_BLOCK)
    x_rows = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    gate_rows = weight + (expert * (2 * OUTPUTS) + gate)[:, None] * INPUTS + column[None, :]
    up_rows = gate_rows + OUTPUTS * INPUTS
    gate_acc = _zeros(ROWS_BLOCK, OUTPUTS_BLOCK, SWAP)
    up_acc = _zeros(ROWS_BLOCK, OUTPUTS_BLOCK, SWAP)
    SCALE_COLUMNS: tl.constexpr = INPUTS // SCALE_BLOCK
    if SCALES == BLOCK_SCALES:
        first_gate = column_block * OUTPUTS_BLOCK // SCALE_BLOCK
        block_scales = scales + (expert * (2 * OUTPUTS // SCALE_BLOCK) + first_gate) * SCALE_COLUMNS
    for first in tl.range(0, INPUTS, INPUTS_BLOCK, num_stages=STAGES):
        is_input = first + column < INPUTS
        x_block = _load_block(x_rows + first, is_pair, is_input, True, MASK_INPUTS)
        gate_block = _load_block(gate_rows + first, is_output, is_input, MASK_OUTPUTS, MASK_INPUTS)
        up_block = _load_block(up_rows + first, is_output, is_input, MASK_OUTPUTS, MASK_INPUTS)
        if SCALES == BLOCK_SCALES:
            inputs = first // SCALE_BLOCK
            group_scales = x_scales + token * token_stride + inputs * group_stride
            x_scale = _along_rows(tl.load(group_scales, is_pair, 0.0), SWAP)
            gate_scale = tl.load(block_scales + inputs)
            up_scale = tl.load(block_scales + OUTPUTS // SCALE_BLOCK * SCALE_COLUMNS + inputs)
            nothing = _zeros(ROWS_BLOCK, OUTPUTS_BLOCK, SWAP)
            gate_acc += _multiply(nothing, x_block, gate_block, SWAP, PRECISION) * (x_scale * gate_scale)
            up_acc += _multiply(nothing, x_block, up_block, SWAP, PRECISION) * (x_scale * up_scale)
        else:
            gate_acc = _multiply(gate_acc, x_block, gate_block, SWAP, PRECISION)
            up_acc = _multiply(up_acc, x_block, up_block, SWAP, PRECISION)
    if SCALES == CHANNEL_SCALES:
        x_scale = _along_rows(tl.load(x_scales + token * token_stride, is_pair, 0.0), SWAP)
        gate_scales = scales + expert * (2 * OUTPUTS) + gate
        gate_acc *= x_scale * _along_outputs(tl.load(gate_scales, is_output, 0.0), SWAP)
        up_acc *= x_scale * _along_outputs(tl.load(gate_scales + OUTPUTS, is_output, 0.0), SWAP)
    product = gate_acc / (1.0 + tl.exp(-gate_acc)) * up_acc
    _store_tile(product, output, pair, is_pair, gate, is_output, OUTPUTS, SWAP)


@triton.jit(do_not_specialize=["pairs", "token_stride", "group_stride"])
def down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    topk_weights: tl.tensor,
    pair_ids: tl.tensor,
    expert_ids: tl.tensor,
    num_blocks: tl.tensor,
    output: tl.tensor,
    pairs: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute OUTPUTS_BLOCK outputs of the down-projection of one row block, times the routing weights.

    Grid: (most row blocks * column blocks). With PREFETCH, the first weights are fetched into the L2 cache before the
    kernel ahead has ended; that is ``gate_up_kernel``, or its quantization, and the pairs were sorted before it began.

    x                   [pairs, INPUTS], in the type of the weights
    weight              [EXPERTS, OUTPUTS, INPUTS]
    x_scales            float32 [pairs, 1] with CHANNEL_SCALES, [pairs, INPUTS / 128] with BLOCK_SCALES, else not read;
                        pairs are ``token_stride`` apart and groups ``group_stride``
    scales              float32 [EXPERTS, OUTPUTS] with CHANNEL_SCALES, [EXPERTS, OUTPUTS / 128, INPUTS / 128] with
                        BLOCK_SCALES, else not read
    topk_weights        float32 [pairs]
    output              [pairs, OUTPUTS], written, in the type of the model; rows of other ranks' experts are not

    The other arguments are those of ``gate_up_kernel``.
    """
    COLUMN_BLOCKS: tl.constexpr = (OUTPUTS + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    MASK_OUTPUTS: tl.constexpr = OUTPUTS % OUTPUTS_BLOCK != 0
    MASK_INPUTS: tl.constexpr = INPUTS % INPUTS_BLOCK != 0
    out = tl.arange(0, OUTPUTS_BLOCK)
    column = tl.arange(0, INPUTS_BLOCK)
    if PREFETCH:
        # From L2: the L1 cache of this multiprocessor may hold words of an earlier layer. Words that are not written yet
        # (where another kernel is ahead) may cost a prefetch, but name no address outside of the weight.
        used = tl.minimum(tl.load(num_blocks, cache_modifier=".cg"), tl.num_programs(0) // COLUMN_BLOCKS)
        if tl.program_id(0) < used * COLUMN_BLOCKS:
            block, column_block = _locate_block(used, COLUMN_BLOCKS, GROUP)
            expert = tl.load(expert_ids + block, cache_modifier=".cg")
            expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1).to(tl.int64)
            rows = tl.minimum(column_block * OUTPUTS_BLOCK + out, OUTPUTS - 1)
            _prefetch_rows(weight + (expert * OUTPUTS + rows) * INPUTS, INPUTS, INPUTS_BLOCK, STAGES, PDL)
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    used = tl.load(num_blocks)
    if tl.program_id(0) >= used * COLUMN_BLOCKS:
        return
    block, column_block = _locate_block(used, COLUMN_BLOCKS, GROUP)
    pair = tl.load(pair_ids + block * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK))
    is_pair = pair < pairs
    expert = tl.load(expert_ids + block).to(tl.int64)
    out += column_block * OUTPUTS_BLOCK
    is_output = out < OUTPUTS
    x_rows = x + pair.to(tl.int64)[:, None] * INPUTS + column[None, :]
    rows = weight + (expert * OUTPUTS + out)[:, None] * INPUTS + column[None, :]
    acc = _zeros(ROWS_BLOCK, OUTPUTS_BLOCK, SWAP)
    SCALE_COLUMNS: tl.constexpr = INPUTS // SCALE_BLOCK
    if SCALES == BLOCK_SCALES:
        first_out = column_block * OUTPUTS_BLOCK // SCALE_BLOCK
        block_scales = scales + (expert * (OUTPUTS // SCALE_BLOCK) + first_out) * SCALE_COLUMNS
    for first in tl.range(0, INPUTS, INPUTS_BLOCK, num_stages=STAGES):
        is_input = first + column < INPUTS
        x_block = _load_block(x_rows + first, is_pair, is_input, True, MASK_INPUTS)
        weight_block = _load_block(rows + first, is_output, is_input, MASK_OUTPUTS, MASK_INPUTS)
        if SCALES == BLOCK_SCALES:
            inputs = first // SCALE_BLOCK
            group_scales = x_scales + pair * token_stride + inputs * group_stride
            x_scale = _along_rows(tl.load(group_scales, is_pair, 0.0), SWAP)
            nothing = _zeros(ROWS_BLOCK, OUTPUTS_BLOCK, SWAP)
            block_product = _multiply(nothing, x_block, weight_block, SWAP, PRECISION)
            acc += block_product * (x_scale * tl.load(block_scales + inputs))
        else:
            acc = _multiply(acc, x_block, weight_block, SWAP, PRECISION)
    factor = tl.load(topk_weights + pair, is_pair, 0.0)
    if SCALES == CHANNEL_SCALES:
        factor *= tl.load(x_scales + pair * token_stride, is_pair, 0.0)
        channel = tl.load(scales + expert * OUTPUTS + out, is_output, 0.0)
        acc *= _along_outputs(channel, SWAP)
    acc *= _along_rows(factor, SWAP)
    _store_tile(acc, output, pair, is_pair, out, is_output, OUTPUTS, SWAP)


@triton.jit
def _prefetch_rows(
    rows: tl.tensor,
    INPUTS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefetch the columns of the pipeline's first STAGES iterations of weight rows at pointers [rows]."""
    LINE: tl.constexpr = CACHE_LINE_BYTES * 8 // rows.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (INPUTS_BLOCK + LINE - 1) // LINE
    for each in tl.static_range(STAGES):
        column = tl.minimum(each * INPUTS_BLOCK + tl.arange(0, LINES) * LINE, INPUTS - 1)
        prefetch(rows[:, None] + column[None, :], PDL)


@triton.jit
def _store_tile(
    tile: tl.tensor,
    output: tl.tensor,
    pair: tl.tensor,
    is_pair: tl.tensor,
    column: tl.tensor,
    is_output: tl.tensor,
    OUTPUTS: tl.constexpr,
    SWAP: tl.constexpr,
) -> None:
    """Store a tile of the product to the rows of its pairs."""
    values = tile.to(output.dtype.element_ty)
    if SWAP:
        values = tl.trans(values)
    inside = is_pair[:, None] & is_output[None, :]
    tl.store(output + pair.to(tl.int64)[:, None] * OUTPUTS + column[None, :], values, inside)


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    sorted_pairs: SortedPairs,
    output: torch.Tensor,
    *,
    tile: GroupedGemmTile,
) -> None:
    """Write silu(gate) * up of each pair to output [pairs, I]: x [T, H] times weight [E, 2 * I, H].

    ``scales`` are those of x and of the weight, float32: [T, 1] and [E, 2 * I], or of blocks of 128 inputs and of
    128 x 128 weights, [T, H / 128] and [E, 2 * I / 128, H / 128].
    """
    pairs, outputs = output.shape
    launch(
        gate_up_kernel,
        (_num_programs(sorted_pairs, outputs, tile), 1, 1),
        (x, weight, *_scales_or(scales, sorted_pairs.num_blocks), *sorted_pairs, output),
        (pairs, x.stride(0), *_scale_strides(scales)),
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        TOP_K=pairs // x.shape[0],
        **_options(x, scales, sorted_pairs, tile),
    )


def down(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    topk_weights: torch.Tensor,
    sorted_pairs: SortedPairs,
    output: torch.Tensor,
    *,
    tile: GroupedGemmTile,
) -> None:
    """Write the weighted output of each pair to output [pairs, H]: x [pairs, I] times weight [E, H, I].

    ``scales`` as ``gate_up`` takes them; ``topk_weights`` are float32, one for each pair.
    """
    pairs, outputs = output.shape
    launch(
        down_kernel,
        (_num_programs(sorted_pairs, outputs, tile), 1, 1),
        (x, weight, *_scales_or(scales, sorted_pairs.num_blocks), topk_weights, *sorted_pairs, output),
        (pairs, *_scale_strides(scales)),
        EXPERTS=weight.shape[0],
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        PREFETCH=True,
        **_options(x, scales, sorted_pairs, tile),
    )


def _num_programs(sorted_pairs: SortedPairs, outputs: int, tile: GroupedGemmTile) -> int:
    column_blocks: int = triton.cdiv(outputs, tile.outputs)
    return len(sorted_pairs.expert_ids) * column_blocks


def _scales_or(
    scales: tuple[torch.Tensor, torch.Tensor] | None, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, or a tensor in their place that is not read."""
    return (other, other) if scales is None else scales


def _scale_strides(scales: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, int]:
    return (0, 0) if scales is None else (scales[0].stride(0), scales[0].stride(1))


def _options(
    x: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    sorted_pairs: SortedPairs,
    tile: GroupedGemmTile,
) -> dict[str, Any]:
    kind = NO_SCALES
    if scales is not None:
        kind = CHANNEL_SCALES if scales[1].dim() == 2 else BLOCK_SCALES
    return {
        "ROWS_BLOCK": len(sorted_pairs.pair_ids) // len(sorted_pairs.expert_ids),
        "OUTPUTS_BLOCK": tile.outputs,
        "INPUTS_BLOCK": tile.inputs,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "STAGES": tile.stages,
        "SCALES": kind.value,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        **pdl_options(x.device),
    }
