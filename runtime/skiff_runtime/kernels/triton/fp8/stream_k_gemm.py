"""The product of a few tokens with a matrix in e4m3, nearly as fast as the matrix can be read.

A GPU's library divides such a product by outputs alone, which leaves some of its processors idle, and all of them at the end.
Here each program takes an equal run of the matrix, tile after tile (Osama et al., 2023, "Stream-K"): where tiles are cut,
sums in float32 are put down, and the last program to do so for a tile adds them up, in the order of the inputs.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import Matrix, QuantizedActivations
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    LINE,
    launch_dependents,
    pdl_options,
    prefetch,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.device_properties import (
    architecture,
    max_shared_memory_bytes,
    processors,
)

OUTPUTS: Final = 64
"""Of a tile, and what the outputs of a matrix must be a multiple of."""
MAX_TOKENS: Final = 128
LEAST_INPUTS: Final = 128
FIRST_ARCHITECTURE: Final = 89
"""The first of NVIDIA's compute capabilities (8.9) whose tensor cores multiply e4m3."""
SPARE_BYTES: Final = 1024
"""Of shared memory, beside what is on its way."""
LEAST_TOKENS: Final = 16
"""Which the tensor cores multiply at least."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Inputs that a program multiplies at a time, how many such are on their way, and how many programs there are.

    No ``programs``: one for each of the GPU's processors.
    """

    inputs: int
    stages: int
    programs: int | None = None
    warps: int = 4


@triton.jit(do_not_specialize=["tokens", "total", "run"])
def stream_k_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    total: tl.tensor,
    run: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Blocks of ``INPUTS`` inputs are counted through all tiles, of which each has ``BLOCKS``."""
    launch_dependents(PDL)
    program = tl.program_id(0)
    begin = program * run
    end = tl.minimum(begin + run, total)
    lane, token, column = tl.arange(0, OUTPUTS), tl.arange(0, TOKENS), tl.arange(0, INPUTS)
    given = x + token[None, :] * x_stride + column[:, None]
    inside = (token < tokens)[None, :]
    _look_ahead(weight, begin, end, weight_stride, BLOCKS, OUTPUTS, INPUTS, STAGES, PDL)
    wait_for_dependencies(PDL)
    for tile in range(begin // BLOCKS, (end - 1) // BLOCKS + 1):
        row = tile * OUTPUTS + lane
        rows = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
        first, last = tl.maximum(begin - tile * BLOCKS, 0), tl.minimum(end - tile * BLOCKS, BLOCKS)
        sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            numbers = tl.load(given + block * INPUTS, inside, 0.0)
            sums = tl.dot(tl.load(rows + block * INPUTS), numbers, sums)
        complete = last - first == BLOCKS
        if not complete:
            complete, sums = _put_down(sums, parts, arrivals, program, tile, run, BLOCKS, OUTPUTS, TOKENS)
        if complete:
            factor = tl.load(x_scales + token, token < tokens, 0.0)
            product = sums * tl.load(scales + row)[:, None] * factor[None, :]
            if BIASED:
                product += tl.load(bias + row).to(tl.float32)[:, None]
            at = output + token.to(tl.int64)[None, :] * outputs + row[:, None]
            tl.store(at, product.to(output.dtype.element_ty), inside)


@triton.jit
def _put_down(
    sums: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    program: tl.tensor,
    tile: tl.tensor,
    run: tl.tensor,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Leave a part of a tile to who comes last: (whether that is this program, the sums of all parts if so)."""
    within = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(parts + _place(program, tile, run, BLOCKS, OUTPUTS * TOKENS) + within, sums)
    tl.debug_barrier()
    first, last = tile * BLOCKS // run, (tile * BLOCKS + BLOCKS - 1) // run
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == last - first
    if is_last:
        tl.store(arrivals + tile, 0)
        sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for each in range(first, last + 1):
            place = parts + _place(each, tile, run, BLOCKS, OUTPUTS * TOKENS)
            sums += tl.load(place + within, cache_modifier=".cg")  # not from a cache of this processor alone
    return is_last, sums


@triton.jit
def _look_ahead(
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
    """Let the first blocks of a program's run come into the cache."""
    lines = tl.arange(0, INPUTS // LINE)[None, :] * LINE
    for each in tl.static_range(STAGES):
        block = tl.minimum(begin + each, end - 1)
        row = block // BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
        prefetch(weight + row.to(tl.int64)[:, None] * stride + block % BLOCKS * INPUTS + lines, PDL)


@triton.jit
def _place(
    program: tl.tensor, tile: tl.tensor, run: tl.tensor, BLOCKS: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Of a program's part of a tile: it has at most two, that of its first tile and that of its last."""
    other = tile != program * run // BLOCKS
    return (2 * program + other.to(tl.int32)).to(tl.int64) * SIZE


def pays(x: QuantizedActivations, weight: Matrix) -> bool:
    """Whether ``streamed`` can be used, and was faster than the library's product on an H200."""
    tokens, (outputs, inputs) = x.values.shape[0], weight.values.shape
    most = MAX_TOKENS if inputs > 2 * outputs else MAX_TOKENS // 2
    if not 1 <= tokens <= most or outputs % OUTPUTS or inputs % LEAST_INPUTS:
        return False
    tile, device = tile_of(tokens, inputs), x.values.device
    needed = tile.stages * tile.inputs * (OUTPUTS + _block(tokens)) + SPARE_BYTES
    return architecture(device) >= FIRST_ARCHITECTURE and needed <= max_shared_memory_bytes(device)


def tile_of(tokens: int, inputs: int) -> Tile:
    """The tile that was fastest on an H200, or nearly."""
    if inputs % 512 == 0 and (tokens <= 16 or (tokens <= 64 and inputs < 4096)):
        return Tile(512, 4 if tokens <= 16 else 3)
    if inputs % 256 == 0:
        return Tile(256, {16: 8, 32: 7, 64: 6, 128: 4}[_block(tokens)])
    return Tile(128, 6)


def _block(tokens: int) -> int:
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def streamed(
    x: QuantizedActivations, weight: Matrix, bias: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """x [T, inputs] times weight [outputs, inputs], plus bias [outputs]; [T, outputs]."""
    values = x.values
    (tokens, inputs), outputs = values.shape, weight.values.shape[0]
    tile = tile or tile_of(tokens, inputs)
    blocks = inputs // tile.inputs
    total = outputs // OUTPUTS * blocks
    run = triton.cdiv(total, tile.programs or processors(values.device))
    programs, block = triton.cdiv(total, run), _block(tokens)
    output = torch.empty((tokens, outputs), dtype=x.dtype, device=values.device)
    parts = torch.empty((2 * programs, OUTPUTS, block), dtype=torch.float32, device=values.device)
    stream_k_gemm_kernel[(programs,)](
        *(values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias),
        *(output, parts, weight.arrivals, tokens, outputs, total, run),
        *(values.stride(0), weight.values.stride(0)),
        BLOCKS=blocks,
        TOKENS=block,
        OUTPUTS=OUTPUTS,
        INPUTS=tile.inputs,
        STAGES=tile.stages,
        BIASED=bias is not None,
        num_warps=tile.warps,
        **pdl_options(values.device),
    )
    return output
