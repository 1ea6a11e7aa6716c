"""Stream-K FP8 GEMM: the product of 2 to 128 tokens with an FP8 weight, nearly as fast as the weight can be read.

The problem: with so few tokens a product is as fast as its weight is read, but a library divides it by outputs alone,
into fewer tiles than a GPU has multiprocessors, or into an uneven number for each. The idea (Stream-K, Osama et al.,
2023): lay all tiles of OUTPUTS outputs one after another, as a line of blocks of inputs, and give each program an
equal run of this line. Where a run ends inside a tile, the programs that share the tile put their float32 sums down,
and the last one to do so, by an atomic counter of the tile, adds them up.

Invariant: the sums of a tile are added in the order of the inputs, whichever program comes last, so a product is
always the same to the bit. Counters are all zero between launches; so one product of a weight is in flight at a time.
Cost: at most two partial tiles of each program. On an H200, the four products of a layer of Qwen3-14B with 2 tokens
take 95.5 µs instead of the library's 133.3; reading the weights takes 76.8.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP8Weight, QuantizedActivations
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    CACHE_LINE_BYTES,
    launch_dependents,
    pdl_options,
    prefetch,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.device_properties import (
    compute_capability,
    max_shared_memory_bytes,
    num_sms,
)
from skiff_runtime.kernels.tuning import StreamKTile, tuning_for

OUTPUTS: Final = 64
"""Outputs of a tile; those of a weight must be a multiple of it."""
INPUTS_MULTIPLE: Final = 128
"""The inputs of a weight must be a multiple of it, the smallest block."""
MIN_CAPABILITY: Final = 89
"""The first compute capability (8.9) whose tensor cores multiply FP8."""
SPARE_SHARED_BYTES: Final = 1024
"""Shared memory that the kernel takes beside its pipeline's buffers."""
MIN_TOKENS: Final = 16
"""The fewest tokens that the tensor cores multiply; fewer are padded."""


@triton.jit(do_not_specialize=["tokens", "num_blocks", "run"])
def stream_k_gemm_kernel(
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
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one run of blocks: the end of a tile, whole tiles, and the beginning of another.

    Grid: (programs). Blocks of INPUTS inputs are numbered through all tiles, of which each has BLOCKS; program p
    computes those from ``p * run`` to ``(p + 1) * run``, of ``num_blocks`` in all. The first blocks of the weight are
    prefetched into the L2 cache before the kernel ahead has ended.

    x                   FP8 [tokens, BLOCKS * INPUTS], rows ``x_stride`` apart
    weight              FP8 [outputs, BLOCKS * INPUTS], rows ``weight_stride`` apart
    x_scales            float32 [tokens]
    scales              float32 [outputs]
    bias                [outputs]; not read without HAS_BIAS
    output              [tokens, outputs], written, in the type of the model
    partials            float32 [2 * programs, OUTPUTS, TOKENS]: sums of parts of tiles, at most two of each program
    tile_counters       int32 [outputs / OUTPUTS at least], all zero before and after: the programs that put down sums
                        of a tile
    TOKENS              ``tokens`` rounded up to a power of two, MIN_TOKENS at least
    STAGES              of the software pipeline
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    begin = program * run
    end = tl.minimum(begin + run, num_blocks)
    lane, token, column = tl.arange(0, OUTPUTS), tl.arange(0, TOKENS), tl.arange(0, INPUTS)
    x_block = x + token[None, :] * x_stride + column[:, None]
    inside = (token < tokens)[None, :]
    prefetch_weight(weight, begin, end, weight_stride, BLOCKS, OUTPUTS, INPUTS, STAGES, PDL)
    wait_for_dependencies(PDL)
    for tile in range(begin // BLOCKS, (end - 1) // BLOCKS + 1):
        row = tile * OUTPUTS + lane
        rows = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
        first, last = tl.maximum(begin - tile * BLOCKS, 0), tl.minimum(end - tile * BLOCKS, BLOCKS)
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            x_values = tl.load(x_block + block * INPUTS, inside, 0.0)
            acc = tl.dot(tl.load(rows + block * INPUTS), x_values, acc)
        complete = last - first == BLOCKS
        if not complete:
            complete, acc = share_partial(
                acc, partials, tile_counters, program, tile, run, BLOCKS, OUTPUTS, TOKENS
            )
        if complete:
            x_scale = tl.load(x_scales + token, token < tokens, 0.0)
            product = acc * tl.load(scales + row)[:, None] * x_scale[None, :]
            if HAS_BIAS:
                product += tl.load(bias + row).to(tl.float32)[:, None]
            at = output + token.to(tl.int64)[None, :] * outputs + row[:, None]
            tl.store(at, product.to(output.dtype.element_ty), inside)


@triton.jit
def share_partial(
    acc: tl.tensor,
    partials: tl.tensor,
    tile_counters: tl.tensor,
    program: tl.tensor,
    tile: tl.tensor,
    run: tl.tensor,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Put down the sums of a part of a tile; return (whether all parts are there, the sums of all parts if so).

    The program that comes last adds the parts up, in the order of the inputs, and sets the tile's counter back to zero.
    """
    within = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(partials + _partial_offset(program, tile, run, BLOCKS, OUTPUTS * TOKENS) + within, acc)
    # All threads of the program must have stored their sums before the counter says that they are there.
    tl.debug_barrier()
    first, last = tile * BLOCKS // run, (tile * BLOCKS + BLOCKS - 1) // run
    is_last = tl.atomic_add(tile_counters + tile, 1, sem="acq_rel") == last - first
    if is_last:
        tl.store(tile_counters + tile, 0)
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for each in range(first, last + 1):
            partial = partials + _partial_offset(each, tile, run, BLOCKS, OUTPUTS * TOKENS)
            # From L2: the L1 cache of this multiprocessor may hold sums of an earlier launch.
            acc += tl.load(partial + within, cache_modifier=".cg")
    return is_last, acc


@triton.jit
def prefetch_weight(
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefetch the first STAGES blocks of a program's run into the L2 cache.

    weight              bytes, rows ``stride`` apart; a row's part of a block is INPUTS of them
    """
    LINES: tl.constexpr = (INPUTS + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES
    lines = tl.arange(0, LINES)[None, :] * CACHE_LINE_BYTES
    for each in tl.static_range(STAGES):
        block = tl.minimum(begin + each, end - 1)
        row = block // BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
        prefetch(weight + row.to(tl.int64)[:, None] * stride + block % BLOCKS * INPUTS + lines, PDL)


@triton.jit
def _partial_offset(
    program: tl.tensor, tile: tl.tensor, run: tl.tensor, BLOCKS: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Return where a program's sums of ``tile`` begin: it has two parts at most, in its first and last tile."""
    is_second = tile != program * run // BLOCKS
    return (2 * program + is_second.to(tl.int32)).to(tl.int64) * SIZE


def is_profitable(x: QuantizedActivations, weight: FP8Weight) -> bool:
    """Return whether the kernel supports this product and is faster at it than the library's."""
    (tokens, (outputs, inputs)), device = (x.values.shape[0], weight.values.shape), x.values.device
    tuning = tuning_for(device).stream_k
    most = tuning.max_tokens_of_tall if inputs > 2 * outputs else tuning.max_tokens
    if not 1 <= tokens <= most or outputs % OUTPUTS or inputs % INPUTS_MULTIPLE:
        return False
    tile = _choose_tile(tokens, inputs, device)
    needed = tile.stages * tile.inputs * (OUTPUTS + padded_tokens(tokens)) + SPARE_SHARED_BYTES
    return compute_capability(device) >= MIN_CAPABILITY and needed <= max_shared_memory_bytes(device)


def stream_k_gemm(
    x: QuantizedActivations,
    weight: FP8Weight,
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
    stream_k_gemm_kernel[(programs,)](
        *(values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, partials, weight.tile_counters, tokens, outputs, num_blocks, run),
        *(values.stride(0), weight.values.stride(0)),
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


def _choose_tile(tokens: int, inputs: int, device: torch.device) -> StreamKTile:
    for rule in tuning_for(device).stream_k.rules:
        fits = tokens <= rule.max_tokens and (rule.max_inputs is None or inputs <= rule.max_inputs)
        if fits and inputs % rule.tile.inputs == 0:
            return rule.tile
    raise ValueError(f"no tile for {tokens} tokens and {inputs} inputs")


def padded_tokens(tokens: int) -> int:
    """Return ``tokens`` rounded up to a power of two, MIN_TOKENS at least."""
    return max(MIN_TOKENS, 1 << (tokens - 1).bit_length())
