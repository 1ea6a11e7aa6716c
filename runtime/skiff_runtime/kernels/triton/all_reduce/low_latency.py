"""One-shot all-reduce of small messages by LL words, alone or fused with the residual addition and RMSNorm.

Each rank pushes its whole message to every peer and sums what arrives, in rank order: one crossing of NVLink, no fence
and no barrier. The protocol, and why it is right, is in ``peer_memory``. A message is cut into tiles of at most LINES
lines, and program c takes tiles c, c + programs, ...: first it pushes all of them, then it receives them one by one.

A fused kernel's tile is a row. It stores the sum with the residual, reads the row back behind a barrier, and computes
the norm by the code of the kernel that is not fused, from the same elements in the same layout. So its results are
those of the all-reduce followed by that kernel, bit for bit, at the cost of one more read from the L2 cache.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    CHANNELS,
    LINE_BYTES,
    SLOT_LINES,
    TIMED_OUT,
    PeerMemory,
    add_words,
    end_call,
    is_refresh,
    load_ranks,
    may_store,
    receive_words,
    sort_by_rank,
    start_call,
    store_words,
    sum_words,
    words_offset,
)
from skiff_runtime.kernels.triton.fp8.quantize import empty_quantized, row_options, store_row
from skiff_runtime.kernels.triton.norm_act.rms_norm import normalize_row, row_warps
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

TILE_LINES: Final = 256
TILE_WARPS: Final = 8
"""Lines and warps of one tile of a message that is not cut into rows. Two H200, 10, 82 and 328 KB: 3.0, 3.1 and 5.1 us; by
4 warps 3.4, 3.7 and 6.0; 512 lines by 16 warps 3.4, 3.8 and 5.1."""
_COLLECTIVE = tl.constexpr(1)
_SLOT_LINES = tl.constexpr(SLOT_LINES)


@triton.jit(do_not_specialize=["lines"])
def low_latency_all_reduce_kernel(
    x: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    lines: tl.tensor,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Replace a message by its sum over the ranks.

    Grid: (programs), at most CHANNELS. The addresses of the peers, which no kernel writes, are loaded before the kernel
    ahead has ended.

    x                   [lines * 16 bytes], overwritten
    table, epochs, control  int64, as ``PeerMemory`` describes them; epochs are counted
    LINES               lines of a tile
    PTX                 False in Triton's interpreter, which runs no PTX
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    tiles = tl.cdiv(lines, LINES)
    _push_tiles(x, own, peers, rank, channel, epoch, limit, tiles, lines, LINES, LINES, RANKS, PTX)
    state = tl.full((), 0, tl.int32)
    for tile in range(channel, tiles, tl.num_programs(0)):
        summed, inside, word_indices, waited = _receive_tile(
            x, own, rank, channel, epoch, tile, lines, limit, LINES, LINES, RANKS, PTX
        )
        tl.store(x.to(tl.pointer_type(tl.int64)) + word_indices, summed, inside)
        state = tl.maximum(state, waited)
        limit = tl.where(waited == TIMED_OUT, -1, limit)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit(do_not_specialize=["rows"])
def all_reduce_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum rows over the ranks, add the residual, and normalize the sums.

    Grid: (programs), at most CHANNELS; a program computes whole rows. The norm's weight and the addresses of the peers
    are loaded before the kernel ahead has ended.

    x                   [rows, WIDTH], this rank's part
    residual            [rows, WIDTH]
    weight              [WIDTH]
    normed              [rows, WIDTH], written
    total               [rows, WIDTH], written: the rounded sum over the ranks plus the residual, rounded
    table, epochs, control, PTX  as ``low_latency_all_reduce_kernel``
    BLOCK               WIDTH rounded up to a power of two
    ROW_LINES, LINES    lines of a row, and these rounded up to a power of two
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    _push_tiles(
        x, own, peers, rank, channel, epoch, limit, rows, rows * ROW_LINES, ROW_LINES, LINES, RANKS, PTX
    )
    state = tl.full((), 0, tl.int32)
    for row in range(channel, rows, tl.num_programs(0)):
        waited = _receive_row(
            x, residual, total, own, rank, channel, epoch, row, rows, limit, ROW_LINES, LINES, RANKS, PTX
        )
        value = tl.load(total + row * WIDTH + columns, inside, 0.0).to(tl.float32)
        row_normed = normalize_row(value, weights, eps, WIDTH, normed.dtype.element_ty)
        tl.store(normed + row * WIDTH + columns, row_normed, inside)
        state = tl.maximum(state, waited)
        limit = tl.where(waited == TIMED_OUT, -1, limit)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit(do_not_specialize=["rows"])
def all_reduce_add_rms_norm_quantize_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum rows over the ranks, add the residual, normalize the sums, and quantize them to FP8.

    Grid and arguments as ``all_reduce_add_rms_norm_kernel``; values, scales and bound as
    ``add_rms_norm_quantize_kernel``.
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    _push_tiles(
        x, own, peers, rank, channel, epoch, limit, rows, rows * ROW_LINES, ROW_LINES, LINES, RANKS, PTX
    )
    state = tl.full((), 0, tl.int32)
    for row in range(channel, rows, tl.num_programs(0)):
        waited = _receive_row(
            x, residual, total, own, rank, channel, epoch, row, rows, limit, ROW_LINES, LINES, RANKS, PTX
        )
        value = tl.load(total + row * WIDTH + columns, inside, 0.0).to(tl.float32)
        normed = normalize_row(value, weights, eps, WIDTH, total.dtype.element_ty).to(tl.float32)
        store_row(normed, values, scales, row, columns, bound, WIDTH)
        state = tl.maximum(state, waited)
        limit = tl.where(waited == TIMED_OUT, -1, limit)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit
def _push_tiles(
    x: tl.tensor,
    own: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    limit: tl.tensor,
    tiles: tl.tensor,
    lines: tl.tensor,
    TILE_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Store this program's tiles of a message of ``lines`` lines in the memory of every peer; tiles of TILE_LINES lines.

    The two words of a line go to the two halves of a tile's memory, so that one store of a warp covers addresses
    without a gap. In a refresh all words of the channel are stored, those without data as zeros, and also in this rank's
    own memory; nothing is stored once a wait has timed out.
    """
    programs = tl.num_programs(0)
    refresh = is_refresh(epoch)
    offset = words_offset(epoch, rank, channel, RANKS)
    own_tiles = tl.where(refresh, _SLOT_LINES // LINES, tl.cdiv(tiles - channel, programs))
    for count in range(tl.where(may_store(limit), own_tiles, 0)):
        tile = channel + count * programs
        inside, word_indices, slot_offsets = _tile_offsets(tile, count, lines, TILE_LINES, LINES)
        words = tl.load(x.to(tl.pointer_type(tl.int64)) + word_indices, inside, 0)
        active = inside | refresh
        if refresh:
            store_words(own + offset + slot_offsets, words, epoch, active, PTX)
        for step in tl.static_range(RANKS - 1):
            store_words(peers[step] + offset + slot_offsets, words, epoch, active, PTX)


@triton.jit
def _receive_tile(
    x: tl.tensor,
    own: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    tile: tl.tensor,
    lines: tl.tensor,
    limit: tl.tensor,
    TILE_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Return (sums of a tile over all ranks, int64 [LINES, 2], which of them exist, their indices in x, the state)."""
    count = (tile - channel) // tl.num_programs(0)
    inside, word_indices, slot_offsets = _tile_offsets(tile, count, lines, TILE_LINES, LINES)
    own_words = tl.load(x.to(tl.pointer_type(tl.int64)) + word_indices, inside, 0)
    first = own + words_offset(epoch, 0, channel, RANKS)
    received, state = receive_words(first + slot_offsets, rank, epoch, inside, limit, RANKS, PTX)
    ordered = sort_by_rank(received, own_words, rank, RANKS)
    return sum_words(ordered, x.dtype.element_ty, RANKS), inside, word_indices, state


@triton.jit
def _receive_row(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    own: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    limit: tl.tensor,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Store the sum of a row over all ranks and the residual in ``total``; return the state. All threads can read it."""
    summed, inside, word_indices, state = _receive_tile(
        x, own, rank, channel, epoch, row, rows * ROW_LINES, limit, ROW_LINES, LINES, RANKS, PTX
    )
    added = tl.load(residual.to(tl.pointer_type(tl.int64)) + word_indices, inside, 0)
    tl.store(
        total.to(tl.pointer_type(tl.int64)) + word_indices,
        add_words(summed, added, x.dtype.element_ty),
        inside,
    )
    tl.debug_barrier()
    return state


@triton.jit
def _tile_offsets(
    tile: tl.tensor, count: tl.tensor, lines: tl.tensor, TILE_LINES: tl.constexpr, LINES: tl.constexpr
) -> tl.tensor:
    """Return (lines of a tile that exist [LINES, 1], their 8-byte words' indices in the message and offsets in the slot).

    Indices and offsets, in bytes, are [LINES, 2]; ``count`` is the number of tiles that the program has taken before.
    """
    line, half = tl.arange(0, LINES)[:, None], tl.arange(0, 2)[None, :]
    inside = (line < TILE_LINES) & (tile * TILE_LINES + line < lines)
    word_indices = (tile * TILE_LINES + line) * 2 + half
    slot_offsets = ((count * 2 + half) * LINES + line) * 16
    return inside, word_indices, slot_offsets


def low_latency_all_reduce(x: torch.Tensor, memory: PeerMemory) -> None:
    """Replace ``x``, contiguous and of at most ``low_latency_capacity`` bytes, by its sum over the ranks."""
    lines = x.nbytes // LINE_BYTES
    low_latency_all_reduce_kernel[(min(CHANNELS, triton.cdiv(lines, TILE_LINES)),)](
        x,
        *(memory.table, memory.epochs, memory.control, lines),
        LINES=TILE_LINES,
        RANKS=memory.ranks,
        PTX=memory.has_ptx,
        num_warps=TILE_WARPS,
        **pdl_options(x.device),
    )


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, memory: PeerMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the RMSNorm of the total, the total) of x [rows, n], summed over the ranks, and the residual.

    Both are contiguous, and ``fits_rows`` is true for them.
    """
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, width = x.shape
    all_reduce_add_rms_norm_kernel[(min(CHANNELS, rows),)](
        *(x, residual, weight, normed, total),
        *(memory.table, memory.epochs, memory.control, rows, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
        **_row_lines(x),
        **_launch_options(memory),
    )
    return normed, total


def all_reduce_add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    memory: PeerMemory,
    bound: float = math.inf,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return (the quantized RMSNorm of the total, the total), as ``all_reduce_add_rms_norm``."""
    rows, width = x.shape
    quantized = empty_quantized(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    all_reduce_add_rms_norm_quantize_kernel[(min(CHANNELS, rows),)](
        *(x, residual, weight, total, quantized.values, quantized.scales),
        *(memory.table, memory.epochs, memory.control, rows, eps, bound),
        RANKS=memory.ranks,
        PTX=memory.has_ptx,
        **_row_lines(x),
        **row_options(x, width),
    )
    return quantized, total


def low_latency_capacity() -> int:
    """Return the bytes of the largest message that the channels can receive as LL words."""
    return CHANNELS * SLOT_LINES * LINE_BYTES


def fits_rows(rows: int, row_bytes: int) -> bool:
    """Return whether a fused kernel can take the rows: their tiles fit into the channels' memory."""
    tile = triton.next_power_of_2(row_bytes // LINE_BYTES)
    return row_bytes % LINE_BYTES == 0 and triton.cdiv(rows, CHANNELS) * tile <= SLOT_LINES


def _row_lines(x: torch.Tensor) -> dict[str, int]:
    lines = x.shape[1] * x.itemsize // LINE_BYTES
    return {"ROW_LINES": lines, "LINES": triton.next_power_of_2(lines)}


def _launch_options(memory: PeerMemory) -> dict[str, Any]:
    return {"RANKS": memory.ranks, "PTX": memory.has_ptx, **pdl_options(memory.table.device)}
