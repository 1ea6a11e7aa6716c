"""LoRA's two products, A x (shrink) and B (A x) (expand), of many adapters, in one launch.

The problem: both products read few bytes, so a launch for each costs more than the work (Punica and vLLM:
``lora_shrink`` and ``lora_expand``). The second needs the whole first one, for which every program would have to read all
of A. The idea: the programs, no more than run at a time, first compute parts of A x, pass them on as LL words
(``ll_words``), and then take outputs of B, for which they wait. None of them waits for a program that waits.

    shrink item     (row block, part, chunk of inputs): ROWS x RANK partial sums of A x
    expand item     (row block, tile of one part's outputs): the sum of all chunks, times B, added to the output

Invariant: a token's sums are taken in the order of chunks and of ranks, whichever program computes them, so a step gives
the same bits each time.

Cost: A and B are read once by each row block, and 8 bytes pass for each partial sum. Behind a base product that reads
the same x, A x is computed while the product's last programs run (EARLY).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.contract import MAX_LORA_RANK
from skiff_runtime.kernels.lora import LoraMapping, LoraWeights
from skiff_runtime.kernels.triton.lora.group_tokens import choose_tile, step_sizes
from skiff_runtime.kernels.triton.lora.ll_words import (
    make_mark,
    receive_words,
    store_words,
)
from skiff_runtime.kernels.triton.moe.moe_align_block_size import max_row_blocks
from skiff_runtime.kernels.triton.runtime.cached_launch import launch
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    CACHE_LINE_BYTES,
    launch_dependents,
    pdl_options,
    prefetch,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.device_properties import num_sms
from skiff_runtime.kernels.tuning import LoraTile

MAX_PARTS: Final = 3
MIN_RANK: Final = 16
"""The fewest columns of A x that the tensor cores multiply; lower ranks are padded."""
MIN_BLOCK: Final = 16
"""The fewest inputs or outputs of a tile."""
MAX_PARTIAL_SUMS: Final = 512
"""Partial sums that a warp adds up at a time, at most: 16 of each thread."""
WARPS_OF_SM: Final = 16
"""Warps of all programs that run on a multiprocessor at a time: each thread then has 128 registers."""
MAX_REGISTERS: Final = 128


@triton.jit(do_not_specialize=["tokens", "blocks"])
def add_lora_kernel(
    out: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    block_tokens: tl.tensor,
    block_slots: tl.tensor,
    num_blocks: tl.tensor,
    epoch: tl.tensor,
    call_id: tl.tensor,
    words: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    THIRD_SIZE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    PRELOAD: tl.constexpr,
    SHRINK: tl.constexpr,
    EXPAND: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute some shrink items, then some expand items.

    Grid: (programs), at most as many as run at a time. Program p takes shrink items p, p + programs, ..., and an equal run
    of expand items, the last program the first one: so with few of both no program has one of each. With PRELOAD the
    row blocks are read before the kernel ahead has ended, because their launch does not let others start early, and so
    is B; with EARLY x is as well, and A x computed, and without it A is prefetched.

    out                 [tokens, outputs], rows ``out_stride`` apart; B (A x) is added in place
    x                   [tokens, INPUTS], rows ``x_stride`` apart
    a                   [slots, PARTS, MAX_RANK, INPUTS], in the type of x
    b                   [slots, outputs, MAX_RANK], likewise
    ranks               int32 [slots]
    block_tokens, block_slots, num_blocks  int32, see ``RowBlocks``; ROWS tokens are a block, ``blocks`` the most of them
    epoch, call_id      int32 [1]
    words               int64 [blocks * PARTS * chunks * ROWS * RANK at least]
    FIRST_SIZE, SECOND_SIZE, THIRD_SIZE  outputs of the parts, 0 of those beyond PARTS
    RANK                MAX_RANK rounded up to a power of two, 16 at least
    ROWS                16 or more, for the tensor cores, or 1, without them
    CHUNK               inputs of a shrink item, a multiple of INPUTS_BLOCK
    CHUNKS_BLOCK        the number of chunks, rounded up to a power of two
    INPUTS_BLOCK        inputs of one loop iteration
    STAGES              of the loop's software pipeline, for the tensor cores
    SINGLE              whether no program has more than one expand item, however many blocks are in use
    PRELOAD, EARLY      what is read before the kernel ahead has ended; EARLY needs PRELOAD
    SHRINK, EXPAND      whether items of this kind are computed: both, but in Triton's interpreter, whose programs run
                        one after the other, by a launch for each
    PTX                 False in Triton's interpreter, which runs no PTX
    """
    CHUNKS: tl.constexpr = (INPUTS + CHUNK - 1) // CHUNK
    TILES: tl.constexpr = (
        (FIRST_SIZE + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
        + (SECOND_SIZE + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
        + (THIRD_SIZE + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    )
    # Where another kernel may have written what is read, loads come from L2: there may be older lines in L1. That is slow
    # for many programs, which all read the same lines.
    CACHE: tl.constexpr = ".cg" if PRELOAD else ""
    launch_dependents(PDL)
    if not PRELOAD:
        wait_for_dependencies(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    # Loads that depend on little come first; of blocks that are not in use, slots and tokens are those of earlier steps.
    item = program
    slot, token = _load_block(block_slots, block_tokens, item // (PARTS * CHUNKS), blocks, ROWS, CACHE)
    used = tl.load(num_blocks, cache_modifier=CACHE)
    mark = make_mark(epoch, call_id, CACHE)
    shrink_items, expand_items = used * (PARTS * CHUNKS), used * TILES
    turns = 1 if SINGLE else tl.cdiv(expand_items, programs)
    expand_item = (programs - 1 - program) * turns
    expand_end = tl.minimum(expand_item + turns, expand_items)
    expand_slot, expand_token = _load_block(
        block_slots, block_tokens, expand_item // TILES, blocks, ROWS, CACHE
    )
    rank = tl.load(ranks + slot)
    expand_rank = tl.where(expand_item < expand_items, tl.load(ranks + expand_slot), 0)
    b_tile = _load_b(
        b,
        expand_slot,
        expand_rank,
        expand_item % TILES,
        FIRST_SIZE,
        SECOND_SIZE,
        THIRD_SIZE,
        MAX_RANK,
        RANK,
        OUTPUTS_BLOCK,
    )
    if not SINGLE and MAX_RANK <= 32:  # of higher ranks, most columns may be unused
        tile = expand_item % TILES
        for following in range(tile + 1, tl.minimum(tile + expand_end - expand_item, TILES)):
            _prefetch_b(
                b,
                expand_slot,
                following,
                FIRST_SIZE,
                SECOND_SIZE,
                THIRD_SIZE,
                MAX_RANK,
                OUTPUTS_BLOCK,
                PDL,
            )
    if PRELOAD and not EARLY:
        if item < shrink_items:
            _prefetch_a(a, slot, item, INPUTS, PARTS, MAX_RANK, CHUNK, INPUTS_BLOCK, CHUNKS, PDL)
        wait_for_dependencies(PDL)
    if SHRINK:
        for _ in range(tl.cdiv(shrink_items - program, programs)):
            _shrink(
                x,
                a,
                words,
                item,
                slot,
                token,
                rank,
                mark,
                tokens,
                x_stride,
                INPUTS,
                PARTS,
                MAX_RANK,
                RANK,
                ROWS,
                CHUNK,
                CHUNKS,
                INPUTS_BLOCK,
                STAGES,
                PRECISION,
                PTX,
            )
            item += programs
            slot, token = _load_block(
                block_slots, block_tokens, item // (PARTS * CHUNKS), blocks, ROWS, CACHE
            )
            rank = tl.load(ranks + slot)
    if EARLY:
        wait_for_dependencies(PDL)
    if EXPAND:
        inner = tl.zeros((ROWS, RANK), b.dtype.element_ty)
        received = tl.full((), -1, tl.int32)
        for _ in range(expand_end - expand_item):
            block = expand_item // TILES
            if expand_rank > 0:
                part, first, end = _locate_tile(
                    expand_item % TILES, FIRST_SIZE, SECOND_SIZE, THIRD_SIZE, OUTPUTS_BLOCK
                )
                output = first + tl.arange(0, OUTPUTS_BLOCK)
                target = out + expand_token.to(tl.int64)[:, None] * out_stride + output[None, :]
                is_token = expand_token < tokens
                inside = is_token[:, None] & (output < end)[None, :]
                base = tl.load(target, inside, 0.0)
                if received != block * PARTS + part:
                    received = block * PARTS + part
                    inner = _receive_inner(
                        words, received, is_token, expand_rank, mark, RANK, ROWS, CHUNKS, CHUNKS_BLOCK, PTX
                    ).to(inner.dtype)
                if ROWS == 1:
                    added = tl.sum(b_tile.to(tl.float32) * inner.to(tl.float32), 1)[None, :]
                else:
                    added = tl.dot(inner, tl.trans(b_tile), input_precision=PRECISION)
                tl.store(target, (base.to(tl.float32) + added).to(out.dtype.element_ty), inside)
            if not SINGLE:
                expand_item += 1
                expand_slot, expand_token = _load_block(
                    block_slots, block_tokens, expand_item // TILES, blocks, ROWS, CACHE
                )
                expand_rank = tl.where(expand_item < expand_end, tl.load(ranks + expand_slot), 0)
                b_tile = _load_b(
                    b,
                    expand_slot,
                    expand_rank,
                    expand_item % TILES,
                    FIRST_SIZE,
                    SECOND_SIZE,
                    THIRD_SIZE,
                    MAX_RANK,
                    RANK,
                    OUTPUTS_BLOCK,
                )


@triton.jit
def _load_block(
    block_slots: tl.tensor,
    block_tokens: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    CACHE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (slot, tokens [ROWS]) of a row block, or of the last one there may be; ``CACHE`` is the loads' modifier."""
    block = tl.minimum(block, blocks - 1)
    slot = tl.load(block_slots + block, cache_modifier=CACHE)
    return slot, tl.load(block_tokens + block * ROWS + tl.arange(0, ROWS), cache_modifier=CACHE)


@triton.jit
def _receive_inner(
    words: tl.tensor,
    block_part: tl.tensor,
    is_token: tl.tensor,
    rank: tl.tensor,
    mark: tl.tensor,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Wait for A x of a block and part; return it, float32 [ROWS, RANK], 0 outside of its tokens and rank."""
    chunk, row = tl.arange(0, CHUNKS_BLOCK)[:, None, None], tl.arange(0, ROWS)[None, :, None]
    r = tl.arange(0, RANK)[None, None, :]
    index = ((block_part * CHUNKS + chunk) * ROWS + row) * RANK + r
    active = (chunk < CHUNKS) & is_token[None, :, None] & (r < rank)
    return tl.sum(receive_words(words, index, mark, active, PTX), 0)


@triton.jit
def _shrink(
    x: tl.tensor,
    a: tl.tensor,
    words: tl.tensor,
    item: tl.tensor,
    slot: tl.tensor,
    token: tl.tensor,
    rank: tl.tensor,
    mark: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Compute and store the partial sums of one shrink item, whose block has this slot, tokens [ROWS] and rank."""
    chunk, part = item % CHUNKS, item // CHUNKS % PARTS
    if rank > 0:
        r, column = tl.arange(0, RANK), tl.arange(0, INPUTS_BLOCK)
        first = chunk * CHUNK
        end = tl.minimum(first + CHUNK, INPUTS)
        rows = a + ((slot * PARTS + part) * MAX_RANK + r).to(tl.int64)[:, None] * INPUTS + column[None, :]
        is_rank = (r < rank)[:, None]
        is_token = (token < tokens)[:, None]
        x_rows = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
        if ROWS == 1:
            acc = tl.zeros((RANK, INPUTS_BLOCK), tl.float32)
            for start in range(first, end, INPUTS_BLOCK):
                inside = (start + column < end)[None, :]
                weights = tl.load(rows + start, is_rank & inside, 0.0)
                # From L2: without a wait, a line of an earlier layer may still be in L1.
                values = tl.load(x_rows + start, is_token & inside, 0.0, cache_modifier=".cg")
                acc += weights.to(tl.float32) * values.to(tl.float32)
            partial = tl.sum(acc, 1)[None, :]
        else:
            partial = tl.zeros((ROWS, RANK), tl.float32)
            for start in tl.range(first, end, INPUTS_BLOCK, num_stages=STAGES):
                inside = (start + column < end)[None, :]
                values = tl.load(x_rows + start, is_token & inside, 0.0, cache_modifier=".cg")
                weights = tl.load(rows + start, is_rank & inside, 0.0)
                partial = tl.dot(values, tl.trans(weights), partial, input_precision=PRECISION)
        index = (item * ROWS + tl.arange(0, ROWS))[:, None] * RANK + r[None, :]
        store_words(words, index, partial, mark, is_token & (r < rank)[None, :], PTX)


@triton.jit
def _load_b(
    b: tl.tensor,
    slot: tl.tensor,
    rank: tl.tensor,
    tile: tl.tensor,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    THIRD_SIZE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load B of a tile, [OUTPUTS_BLOCK, RANK]; nothing of rank 0. What is read behind the rank is multiplied by 0."""
    OUTPUTS: tl.constexpr = FIRST_SIZE + SECOND_SIZE + THIRD_SIZE
    _, first, end = _locate_tile(tile, FIRST_SIZE, SECOND_SIZE, THIRD_SIZE, OUTPUTS_BLOCK)
    output, r = first + tl.arange(0, OUTPUTS_BLOCK)[:, None], tl.arange(0, RANK)[None, :]
    rows = b + (slot.to(tl.int64) * OUTPUTS + output) * MAX_RANK + r
    # In whole vectors of 16 bytes: a bound that depends on the rank alone would need a load for each number.
    is_read = (rank > 0) & (r < MAX_RANK) if MAX_RANK < 32 else r < (rank + 15) // 16 * 16
    if MAX_RANK % 16 != 0:
        is_read = is_read & (r < MAX_RANK)
    return tl.load(rows, (output < end) & is_read, 0.0)


@triton.jit
def _locate_tile(
    tile: tl.tensor,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    THIRD_SIZE: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return (the part of a tile, its first output, the end of the part's outputs); no tile is of two parts."""
    first_tiles: tl.constexpr = (FIRST_SIZE + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    second_tiles: tl.constexpr = (SECOND_SIZE + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    part = (tile >= first_tiles).to(tl.int32) + (tile >= first_tiles + second_tiles).to(tl.int32)
    part_tile = tl.where(
        part == 0, tile, tl.where(part == 1, tile - first_tiles, tile - first_tiles - second_tiles)
    )
    part_first = tl.where(part == 0, 0, tl.where(part == 1, FIRST_SIZE, FIRST_SIZE + SECOND_SIZE))
    size = tl.where(part == 0, FIRST_SIZE, tl.where(part == 1, SECOND_SIZE, THIRD_SIZE))
    return part, part_first + part_tile * OUTPUTS_BLOCK, part_first + size


@triton.jit
def _prefetch_a(
    a: tl.tensor,
    slot: tl.tensor,
    item: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefetch A of a shrink item's first INPUTS_BLOCK inputs into the L2 cache, up to 16 of its rows."""
    LINE: tl.constexpr = CACHE_LINE_BYTES * 8 // a.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (INPUTS_BLOCK + LINE - 1) // LINE
    r = tl.minimum(tl.arange(0, 16), MAX_RANK - 1)
    row = (slot * PARTS + item // CHUNKS % PARTS) * MAX_RANK + r
    column = tl.minimum(item % CHUNKS * CHUNK + tl.arange(0, LINES) * LINE, INPUTS - 1)
    prefetch(a + row.to(tl.int64)[:, None] * INPUTS + column[None, :], PDL)


@triton.jit
def _prefetch_b(
    b: tl.tensor,
    slot: tl.tensor,
    tile: tl.tensor,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    THIRD_SIZE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefetch B of a tile into the L2 cache."""
    LINE: tl.constexpr = CACHE_LINE_BYTES * 8 // b.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((OUTPUTS_BLOCK * MAX_RANK + LINE - 1) // LINE)
    OUTPUTS: tl.constexpr = FIRST_SIZE + SECOND_SIZE + THIRD_SIZE
    _, first, end = _locate_tile(tile, FIRST_SIZE, SECOND_SIZE, THIRD_SIZE, OUTPUTS_BLOCK)
    number = tl.minimum(first * MAX_RANK + tl.arange(0, LINES) * LINE, end * MAX_RANK - 1)
    prefetch(b + slot.to(tl.int64) * (OUTPUTS * MAX_RANK) + number, PDL)


def count_words(max_tokens: int, max_loras: int, max_rank: int, device: torch.device) -> int:
    """Return the LL words that steps of up to ``max_tokens`` tokens need, whatever their layers' inputs."""
    most, rank = 0, padded_rank(max_rank)
    for tokens in step_sizes(max_tokens, device):
        tile = choose_tile(tokens, device)
        blocks = max_row_blocks(tokens, max_loras, tile.rows)
        most = max(most, blocks * MAX_PARTS * max_chunks(tile, rank) * tile.rows * rank)
    return most


def padded_rank(max_rank: int) -> int:
    """Return the columns of A x in a tile. Raises ``ValueError`` for ranks that the kernel does not support."""
    if not 1 <= max_rank <= MAX_LORA_RANK:
        raise ValueError(f"the kernels support LoRA ranks of 1 to {MAX_LORA_RANK}, not {max_rank}")
    return max(MIN_RANK, 1 << (max_rank - 1).bit_length())


def max_chunks(tile: LoraTile, rank: int) -> int:
    """Return the maximum number of chunks whose partial sums one program adds up."""
    return max(1, MAX_PARTIAL_SUMS * tile.warps // (tile.rows * rank))


def choose_chunk(tile: LoraTile, inputs: int, rank: int) -> int:
    """Return the inputs of a chunk, a multiple of ``tile_inputs``."""
    least, block = max(tile.chunk, -(-inputs // max_chunks(tile, rank))), tile_inputs(tile, rank)
    return -(-least // block) * block


def tile_inputs(tile: LoraTile, rank: int) -> int:
    """Return the inputs of one loop iteration: fewer of higher ranks where the rows of A are added up in registers."""
    return max(MIN_BLOCK, tile.inputs * MIN_RANK // rank) if tile.rows == 1 else tile.inputs


def tile_outputs(tile: LoraTile, rank: int) -> int:
    """Return the outputs of an expand item: fewer of higher ranks, so that B takes as many registers."""
    return max(MIN_BLOCK, tile.outputs * MIN_RANK // rank)


def max_programs(tile: LoraTile, device: torch.device) -> int:
    """Return the number of programs that certainly run at a time."""
    return num_sms(device) * (WARPS_OF_SM // tile.warps)


def choose_options(
    tokens: int,
    inputs: int,
    part_sizes: Sequence[int],
    *,
    max_loras: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    x_is_complete: bool,
) -> tuple[int, dict[str, Any]]:
    """Return the number of programs, and the constants and options, of a launch for x [tokens, inputs]."""
    rank, tile, parts = padded_rank(max_rank), choose_tile(tokens, device), len(part_sizes)
    chunk, most = choose_chunk(tile, inputs, rank), max_row_blocks(tokens, max_loras, tile.rows)
    chunks = triton.cdiv(inputs, chunk)
    outputs, inputs_block = tile_outputs(tile, rank), tile_inputs(tile, rank)
    tiles = sum(triton.cdiv(size, outputs) for size in part_sizes)
    sizes = dict(zip(("FIRST_SIZE", "SECOND_SIZE", "THIRD_SIZE"), (*part_sizes, 0, 0), strict=False))
    items, programs = most * (parts * chunks + tiles), max_programs(tile, device)
    preload, programs = items <= programs, min(items, programs)
    options: dict[str, Any] = {
        "INPUTS": inputs,
        "PARTS": parts,
        **sizes,
        "MAX_RANK": max_rank,
        "RANK": rank,
        "ROWS": tile.rows,
        "CHUNK": chunk,
        "CHUNKS_BLOCK": triton.next_power_of_2(chunks),
        "INPUTS_BLOCK": inputs_block,
        "OUTPUTS_BLOCK": outputs,
        "STAGES": tile.stages,
        "SINGLE": most * tiles <= programs,
        "PRELOAD": preload,
        "EARLY": x_is_complete and preload,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PTX": device.type == "cuda",
        "num_warps": tile.warps,
        **pdl_options(device),
    }
    if device.type == "cuda":
        options["maxnreg"] = MAX_REGISTERS
    return programs, options


def find_token_counts_by_variant(
    layers: Iterable[tuple[int, Sequence[int]]],
    *,
    max_tokens: int,
    max_loras: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    max_deferred: int = 0,
) -> list[int]:
    """Return numbers of tokens, of up to ``max_tokens``, that together launch every variant of the kernel that steps launch.

    ``layers``: the inputs of each layer, and the outputs of its parts. Steps of up to ``max_deferred`` tokens may not launch
    the kernel. For ahead-of-time compilation.
    """
    shapes = dict.fromkeys((inputs, tuple(sizes)) for inputs, sizes in layers)
    found: dict[tuple[Any, ...], int] = {}
    for tokens in range(1, max_tokens + 1):
        for inputs, sizes in shapes:
            _, options = choose_options(
                tokens,
                inputs,
                sizes,
                max_loras=max_loras,
                max_rank=max_rank,
                dtype=dtype,
                device=device,
                x_is_complete=False,
            )
            found.setdefault((inputs, sizes, tokens <= max_deferred, *options.values()), tokens)
    return sorted(dict.fromkeys(found.values()))


def add_lora(
    out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, mapping: LoraMapping, *, x_is_complete: bool
) -> None:
    """Launch the kernel for ``kernels.lora.add_lora``."""
    blocks = mapping.blocks
    assert blocks is not None and out.stride(1) == x.stride(1) == 1
    (tokens, inputs), device = x.shape, x.device
    max_loras, parts, max_rank = weights.a.shape[:3]
    programs, options = choose_options(
        tokens,
        inputs,
        weights.part_sizes,
        max_loras=max_loras,
        max_rank=max_rank,
        dtype=x.dtype,
        device=device,
        x_is_complete=x_is_complete,
    )
    most, rows = len(blocks.block_slots), options["ROWS"]
    words = most * parts * triton.cdiv(inputs, options["CHUNK"]) * rows * options["RANK"]
    assert rows == blocks.rows and words <= len(blocks.memory.words)
    tensors = (
        *(out, x, weights.a, weights.b, weights.ranks),
        *(blocks.block_tokens, blocks.block_slots, blocks.num_blocks),
        *(blocks.memory.epoch, weights.call_id, blocks.memory.words),
    )
    numbers = (tokens, most, x.stride(0), out.stride(0))
    # The interpreter's programs run one after the other, so those that wait come in a launch behind all others.
    phases = [(True, True)] if device.type == "cuda" else [(True, False), (False, True)]
    for shrink, expand in phases:
        launch(
            add_lora_kernel,
            (programs, 1, 1),
            tensors,
            numbers,
            **{**options, "SHRINK": shrink, "EXPAND": expand},
        )
