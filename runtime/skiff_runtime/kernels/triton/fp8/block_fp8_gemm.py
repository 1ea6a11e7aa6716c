"""Block FP8 GEMM: products of several tokens with a weight that has a scale for each block of 128 x 128.

The tensor cores add up the products of 128 inputs, whose scales are the same for all rows of a tile; the sum is then
multiplied by the scale of the block and by those of the tokens' groups, and added in float32 (DeepSeek-V3, 2024). That
is also more exact than a long sum inside the tensor cores, which keep fewer bits of it than float32 has.

Few tokens are as fast as the weight is read, and take the stream-K schedule of ``stream_k_gemm``, whose invariants hold
here too. For many, cuBLASLt has the same scaling on compute capability 9.0. Tiles are for what neither supports.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8_tensors import BlockFP8Weight, QuantizedActivations
from skiff_runtime.kernels.torch_internals import HAS_BLOCK_SCALED_MM
from skiff_runtime.kernels.triton.fp8.stream_k_gemm import (
    MIN_CAPABILITY,
    OUTPUTS,
    SPARE_SHARED_BYTES,
    padded_tokens,
    prefetch_weight,
    share_partial,
)
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.device_properties import (
    compute_capability,
    max_shared_memory_bytes,
    num_sms,
)
from skiff_runtime.kernels.tuning import MatrixTile, StreamKTile, tuning_for

LIBRARY_CAPABILITY: Final = 90
"""The only compute capability for which cuBLASLt scales groups of 128."""
LIBRARY_TOKENS_MULTIPLE: Final = 4
"""The tokens beside each other in a group's scales must fill whole runs of 16 bytes for the library."""
TILE_GROUP: Final = 8
"""Tiles of tokens that run one after another for the same outputs, so that the cache still holds their weight."""
_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit(do_not_specialize=["tokens", "num_blocks", "run"])
def block_fp8_stream_k_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    partials: tl.tensor,
    tile_counters: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    num_blocks: tl.tensor,
    run: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    scales_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one run of blocks of INPUTS inputs, as ``stream_k_gemm_kernel`` does.

    Grid: (programs). INPUTS is a multiple of 128, and OUTPUTS divides 128, so a block of the weight covers the rows of
    a tile.

    x                   FP8 [tokens, BLOCKS * INPUTS], rows ``x_stride`` apart
    weight              FP8 [outputs, BLOCKS * INPUTS], rows ``weight_stride`` apart
    x_scales            float32 [groups of 128 inputs, tokens]
    scales              float32 [blocks of 128 outputs, groups of inputs], rows ``scales_stride`` apart
    all others          as ``stream_k_gemm_kernel``
    """
    launch_dependents(PDL)
    GROUPS: tl.constexpr = INPUTS // _BLOCK
    program = tl.program_id(0)
    begin = program * run
    end = tl.minimum(begin + run, num_blocks)
    lane, token, column = tl.arange(0, OUTPUTS), tl.arange(0, TOKENS), tl.arange(0, _BLOCK)
    x_block = x + token[None, :] * x_stride + column[:, None]
    inside = (token < tokens)[None, :]
    prefetch_weight(weight, begin, end, weight_stride, BLOCKS, OUTPUTS, INPUTS, STAGES, PDL)
    wait_for_dependencies(PDL)
    for tile in range(begin // BLOCKS, (end - 1) // BLOCKS + 1):
        row = tile * OUTPUTS + lane
        rows = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
        tile_scales = scales + tile * OUTPUTS // _BLOCK * scales_stride
        first, last = tl.maximum(begin - tile * BLOCKS, 0), tl.minimum(end - tile * BLOCKS, BLOCKS)
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            for number in tl.static_range(GROUPS):
                group = block * GROUPS + number
                x_values = tl.load(x_block + group * _BLOCK, inside, 0.0)
                product = tl.dot(tl.load(rows + group * _BLOCK), x_values)
                scale = tl.load(x_scales + group * tokens + token, token < tokens, 0.0)
                acc += product * (scale * tl.load(tile_scales + group))[None, :]
        complete = last - first == BLOCKS
        if not complete:
            complete, acc = share_partial(
                acc, partials, tile_counters, program, tile, run, BLOCKS, OUTPUTS, TOKENS
            )
        if complete:
            if HAS_BIAS:
                acc += tl.load(bias + row).to(tl.float32)[:, None]
            at = output + token.to(tl.int64)[None, :] * outputs + row[:, None]
            tl.store(at, acc.to(output.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def block_fp8_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    scales_stride: tl.tensor,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one tile of TOKENS tokens and OUTPUTS outputs.

    Grid: (tiles), in groups of TILE_GROUP tiles of tokens for each tile of outputs. OUTPUTS divides 128, so a block of
    the weight covers the outputs of a tile.

    x                   FP8 [tokens, INPUTS], rows ``x_stride`` apart
    weight              FP8 [outputs, INPUTS], rows ``weight_stride`` apart
    x_scales            float32 [groups of 128 inputs, tokens]
    scales              float32 [blocks of 128 outputs, groups of inputs], rows ``scales_stride`` apart
    bias                [outputs]; not read without HAS_BIAS
    output              [tokens, outputs], written, in the type of the model
    """
    launch_dependents(PDL)
    token_tiles, output_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, OUTPUTS)
    group_tiles = TILE_GROUP * output_tiles
    first_tile = tl.program_id(0) // group_tiles * TILE_GROUP
    width = tl.minimum(token_tiles - first_tile, TILE_GROUP)
    within = tl.program_id(0) % group_tiles
    token = (first_tile + within % width) * TOKENS + tl.arange(0, TOKENS)
    tile = within // width
    row, column = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, _BLOCK)
    token_inside, row_inside = token < tokens, row < outputs
    x_block = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    rows = weight + row.to(tl.int64)[None, :] * weight_stride + column[:, None]
    scales += tile * OUTPUTS // _BLOCK * scales_stride
    wait_for_dependencies(PDL)
    acc = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for group in tl.range(0, (INPUTS + _BLOCK - 1) // _BLOCK, num_stages=STAGES):
        column_inside = group * _BLOCK + column < INPUTS
        x_values = tl.load(x_block + group * _BLOCK, token_inside[:, None] & column_inside[None, :], 0.0)
        weights = tl.load(rows + group * _BLOCK, row_inside[None, :] & column_inside[:, None], 0.0)
        scale = tl.load(x_scales + tl.cast(group, tl.int64) * tokens + token, token_inside, 0.0)
        acc += tl.dot(x_values, weights) * (scale * tl.load(scales + group))[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + row, row_inside, 0.0).to(tl.float32)[None, :]
    at = output + token.to(tl.int64)[:, None] * outputs + row[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), token_inside[:, None] & row_inside[None, :])


def is_stream_k_profitable(x: QuantizedActivations, weight: BlockFP8Weight) -> bool:
    """Return whether the stream-K kernel supports this product and is faster at it than the others."""
    (tokens, (outputs, inputs)), device = (x.values.shape[0], weight.values.shape), x.values.device
    if not 1 <= tokens <= tuning_for(device).block_fp8.max_tokens or outputs % OUTPUTS or inputs % FP8_BLOCK:
        return False
    tile = _choose_tile(tokens, inputs, device)
    needed = tile.stages * tile.inputs * (OUTPUTS + padded_tokens(tokens)) + SPARE_SHARED_BYTES
    return compute_capability(device) >= MIN_CAPABILITY and needed <= max_shared_memory_bytes(device)


def is_library_usable(x: QuantizedActivations, weight: BlockFP8Weight) -> bool:
    """Return whether cuBLASLt supports this product; its results are bfloat16, so only for models of that type."""
    (tokens, (outputs, inputs)), device = (x.values.shape[0], weight.values.shape), x.values.device
    whole_blocks = outputs % FP8_BLOCK == 0 and inputs % FP8_BLOCK == 0
    return (
        HAS_BLOCK_SCALED_MM
        and x.dtype is torch.bfloat16
        and whole_blocks
        and tokens % LIBRARY_TOKENS_MULTIPLE == 0
        and compute_capability(device) == LIBRARY_CAPABILITY
    )


def block_fp8_stream_k_gemm(
    x: QuantizedActivations,
    weight: BlockFP8Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: StreamKTile | None = None,
) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs].

    ``tile`` replaces the tuned one.
    """
    values = x.values
    (tokens, inputs), outputs = values.shape, weight.values.shape[0]
    tile = tile or _choose_tile(tokens, inputs, values.device)
    blocks = inputs // tile.inputs
    num_blocks = outputs // OUTPUTS * blocks
    run = triton.cdiv(num_blocks, tile.programs or num_sms(values.device))
    programs, padded = triton.cdiv(num_blocks, run), padded_tokens(tokens)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=values.device)
    partials = torch.empty((2 * programs, OUTPUTS, padded), dtype=torch.float32, device=values.device)
    block_fp8_stream_k_kernel[(programs,)](
        *(values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, partials, weight.tile_counters, tokens, outputs, num_blocks, run),
        *(values.stride(0), weight.values.stride(0), weight.scales.stride(0)),
        BLOCKS=blocks,
        TOKENS=padded,
        OUTPUTS=OUTPUTS,
        INPUTS=tile.inputs,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        **pdl_options(values.device),
    )
    return output


def block_fp8_gemm(
    x: QuantizedActivations,
    weight: BlockFP8Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: MatrixTile | None = None,
) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs], of any sizes.

    ``tile`` replaces the tuned one.
    """
    (tokens, inputs), outputs = x.values.shape, weight.values.shape[0]
    tile = tile or tuning_for(x.values.device).block_fp8.matrix_tile
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=x.values.device)
    block_fp8_gemm_kernel[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(outputs, tile.outputs),)](
        *(x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, tokens, outputs),
        *(x.values.stride(0), weight.values.stride(0), weight.scales.stride(0)),
        INPUTS=inputs,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        TILE_GROUP=TILE_GROUP,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        **pdl_options(x.values.device),
    )
    return output


def _choose_tile(tokens: int, inputs: int, device: torch.device) -> StreamKTile:
    for rule in tuning_for(device).block_fp8.rules:
        if tokens <= rule.max_tokens and inputs % rule.tile.inputs == 0:
            return rule.tile
    raise ValueError(f"no tile for {tokens} tokens and {inputs} inputs")
