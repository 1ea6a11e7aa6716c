"""Int4 GEMM: products of 2 to 64 tokens with an int4 weight, dequantized in registers, by stream-K.

The schedule, its invariants and its counters are those of ``fp8.stream_k_gemm``: the tiles of 64 outputs are a line of
blocks of inputs, of which each program computes an equal run. A unit of 128 inputs is 16 words of a row, and the same
four bits of these are 16 consecutive inputs: the depth of one tensor-core instruction, whose activations are one run of
memory. Integers minus their zero points are multiplied exactly; the sum over a group is multiplied by its scale and
added in float32.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import INT4_UNIT, INT4_WORDS
from skiff_runtime.kernels.int4_tensors import Int4Weight
from skiff_runtime.kernels.triton.fp8.stream_k_gemm import (
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
    has_tensor_memory,
    max_shared_memory_bytes,
    num_sms,
)
from skiff_runtime.kernels.triton.w4a16.dequantize import (
    BF16_OFFSET,
    FP16_OFFSET,
    MIN_CAPABILITY,
    load_zero_points,
    supports_int4_ptx,
    unpack_words,
)
from skiff_runtime.kernels.tuning import StreamKTile, tuning_for

WORD_BYTES: Final = 4
_UNIT = tl.constexpr(INT4_UNIT)
_WORDS = tl.constexpr(INT4_WORDS)
_WORD_BYTES = tl.constexpr(WORD_BYTES)
_BF16_OFFSET = tl.constexpr(BF16_OFFSET)
_FP16_OFFSET = tl.constexpr(FP16_OFFSET)


@triton.jit(do_not_specialize=["tokens", "num_blocks", "run"])
def int4_stream_k_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    partials: tl.tensor,
    tile_counters: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    num_blocks: tl.tensor,
    run: tl.tensor,
    x_stride: tl.tensor,
    words_stride: tl.tensor,
    scales_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one run of blocks of INPUTS inputs, as ``fp8.stream_k_gemm_kernel`` does.

    Grid: (programs). INPUTS is a multiple of 128.

    x                   bfloat16 or float16 [tokens, WIDTH], rows ``x_stride`` apart
    words               int32 [outputs, BLOCKS * INPUTS / 8], rows ``words_stride`` apart
    scales, zeros       [outputs, GROUPS], rows ``scales_stride`` apart; zeros are not read without HAS_ZEROS
    bias                [outputs]; not read without HAS_BIAS
    output              [tokens, outputs], written, in the type of x
    partials, tile_counters, TOKENS, STAGES  as ``fp8.stream_k_gemm_kernel``
    GROUP               the inputs of a group, at most 128; 128 where GROUPS is 1
    """
    launch_dependents(PDL)
    UNITS: tl.constexpr = INPUTS // _UNIT
    RUNS_OF_GROUP: tl.constexpr = GROUP // _WORDS
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    OFFSET: tl.constexpr = _BF16_OFFSET if IS_BF16 else _FP16_OFFSET
    program = tl.program_id(0)
    begin = program * run
    end = tl.minimum(begin + run, num_blocks)
    lane, token, word = tl.arange(0, OUTPUTS), tl.arange(0, TOKENS), tl.arange(0, _WORDS)
    x_block = x + token[None, :] * x_stride + word[:, None]
    inside = (token < tokens)[None, :]
    weight_bytes = words.to(tl.pointer_type(tl.uint8))
    BLOCK_BYTES: tl.constexpr = INPUTS // 2
    stride = words_stride * _WORD_BYTES
    prefetch_weight(weight_bytes, begin, end, stride, BLOCKS, OUTPUTS, BLOCK_BYTES, STAGES, PDL)
    wait_for_dependencies(PDL)
    for tile in range(begin // BLOCKS, (end - 1) // BLOCKS + 1):
        row = tile * OUTPUTS + lane
        rows = words + row.to(tl.int64)[:, None] * words_stride + word[None, :]
        row_tables = row.to(tl.int64) * scales_stride
        first, last = tl.maximum(begin - tile * BLOCKS, 0), tl.minimum(end - tile * BLOCKS, BLOCKS)
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            for number in tl.static_range(UNITS):
                unit = block * UNITS + number
                integers = unpack_words(tl.load(rows + unit * _WORDS), IS_BF16, USE_PTX)
                for part in tl.static_range(_UNIT // GROUP):
                    group = unit * (_UNIT // GROUP) + part if GROUPS > 1 else unit * 0
                    known = (lane >= 0) & (group < GROUPS)
                    zero = load_zero_points(zeros, row_tables + group, known, HAS_ZEROS)
                    raised_zero = (zero + OFFSET).to(x.dtype.element_ty)[:, None]
                    product = tl.zeros((OUTPUTS, TOKENS), tl.float32)
                    for each in tl.static_range(RUNS_OF_GROUP):
                        column = unit * _UNIT + (part * RUNS_OF_GROUP + each) * _WORDS
                        x_inside = inside & (column + word < WIDTH)[:, None]
                        x_values = tl.load(x_block + column, x_inside, 0.0)
                        factors = integers[part * RUNS_OF_GROUP + each] - raised_zero
                        product = tl.dot(factors, x_values, product)
                    scale = tl.load(scales + row_tables + group, known, 0.0).to(tl.float32)
                    acc += product * scale[:, None]
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


def is_profitable(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Return whether the kernel supports this product and is faster at it than dequantization and the library."""
    tokens, device = x.shape[0], x.device
    tuning = tuning_for(device).w4a16
    if not 1 <= tokens <= tuning.max_tokens or x.element_size() != 2 or weight.outputs % OUTPUTS:
        return False
    if has_tensor_memory(device):  # the sums of its many products would not fit
        return False
    tile = _choose_tile(tokens, weight, device)
    unit_bytes = INT4_WORDS * WORD_BYTES * OUTPUTS + INT4_UNIT * x.element_size() * padded_tokens(tokens)
    needed = tile.stages * tile.inputs // INT4_UNIT * unit_bytes + SPARE_SHARED_BYTES
    return compute_capability(device) >= MIN_CAPABILITY and needed <= max_shared_memory_bytes(device)


def int4_stream_k_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    tile: StreamKTile | None = None,
) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs].

    ``tile`` replaces the tuned one.
    """
    tokens, outputs = x.shape[0], weight.outputs
    tile = tile or _choose_tile(tokens, weight, x.device)
    blocks = weight.words.shape[1] * 8 // tile.inputs
    num_blocks = outputs // OUTPUTS * blocks
    run = triton.cdiv(num_blocks, tile.programs or num_sms(x.device))
    programs, padded = triton.cdiv(num_blocks, run), padded_tokens(tokens)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    partials = torch.empty((2 * programs, OUTPUTS, padded), dtype=torch.float32, device=x.device)
    int4_stream_k_kernel[(programs,)](
        *(x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros),
        *(weight.scales if bias is None else bias, output, partials, weight.tile_counters),
        *(tokens, outputs, num_blocks, run),
        *(x.stride(0), weight.words.stride(0), weight.scales.stride(0)),
        WIDTH=weight.inputs,
        BLOCKS=blocks,
        GROUP=weight.group_size or INT4_UNIT,
        GROUPS=weight.scales.shape[1],
        TOKENS=padded,
        OUTPUTS=OUTPUTS,
        INPUTS=tile.inputs,
        STAGES=tile.stages,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        USE_PTX=supports_int4_ptx(x.device),
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return output


def _choose_tile(tokens: int, weight: Int4Weight, device: torch.device) -> StreamKTile:
    inputs = weight.words.shape[1] * 8
    for rule in tuning_for(device).w4a16.rules:
        if tokens <= rule.max_tokens and inputs % rule.tile.inputs == 0:
            return rule.tile
    raise ValueError(f"no tile for {tokens} tokens and {inputs} inputs")
