"""One-shot all-reduce of larger messages fused with the residual addition and RMSNorm.

A program owns whole rows: it takes a contiguous chunk of them, pushes it as the one-shot of ``push`` does, waits for
the same chunk of every peer, and then sums, adds and normalizes row by row. It saves a launch, and a trip of the sums to
memory and back. In exchange, at most CHANNELS programs normalize, and they push with the warps of the norm.

Plain data needs no unpacking. So a row of each rank is loaded as elements, in the layout in which the kernel that is
fused holds a row, summed there, and normalized from registers by the code of that kernel: the results are those of the
all-reduce followed by that kernel, bit for bit.
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
    SLOT_BYTES,
    PeerMemory,
    end_call,
    is_refresh,
    load_ranks,
    may_store,
    plain_offset,
    rewrite_words,
    set_flags,
    start_call,
    wait_for_flags,
)
from skiff_runtime.kernels.triton.all_reduce.push import (
    index_words,
    push_capacity,
    store_plain,
)
from skiff_runtime.kernels.triton.fp8.quantize import empty_quantized, row_options, store_row
from skiff_runtime.kernels.triton.norm_act.rms_norm import normalize_row, row_warps
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

PROGRAMS: Final = CHANNELS
"""Programs of a launch, at most."""
TILE_LINES: Final = 1024
"""Lines that a program pushes at a time. Untuned: as ``push.TILE_LINES``, though the warps are those of the norm."""
PREFETCH_BYTES: Final = 80 << 10
"""Limit on the parts of a row, in bytes, up to which a program loads the next row while it normalizes one. Untuned: for
sm_90, 80 KB (5,120 columns of bfloat16, 4 ranks) compile without spills, 96 KB (16,384 columns, 2 ranks) with some."""
_COLLECTIVE = tl.constexpr(2)
_SLOT_BYTES = tl.constexpr(SLOT_BYTES)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit(do_not_specialize=["rows", "chunk"])
def push_all_reduce_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    rows: tl.tensor,
    chunk: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    PREFETCH: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum rows over the ranks, add the residual, and normalize the sums.

    Grid: (programs), at most CHANNELS; a program takes ``chunk`` rows, the last one those that remain. Its plain buffer
    holds one region for each source. The norm's weight and the addresses of the peers are loaded before the kernel
    ahead has ended.

    x                   [rows, WIDTH], this rank's part
    residual            [rows, WIDTH]
    weight              [WIDTH]
    normed              [rows, WIDTH], written
    total               [rows, WIDTH], written: the rounded sum over the ranks plus the residual, rounded
    table, epochs, control, PTX  as ``low_latency_all_reduce_kernel``
    BLOCK               WIDTH rounded up to a power of two
    ROW_LINES, LINES    lines of a row, and lines that are pushed at a time
    PREFETCH            load a row while the one before it is normalized
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    first = channel * chunk
    end = tl.minimum(first + chunk, rows)
    buffer = own + plain_offset(epoch, channel, RANKS)
    _push_rows(x, own, peers, rank, channel, epoch, limit, first, end, ROW_LINES, LINES, RANKS, PTX)
    state = wait_for_flags(own, rank, channel, epoch, limit, 0, RANKS, PTX)
    if PREFETCH:
        following = _load_row(x, residual, buffer, rank, first, first, end, WIDTH, BLOCK, RANKS)
    for row in range(first, end):
        if PREFETCH:
            parts = following
            following = _load_row(x, residual, buffer, rank, row + 1, first, end, WIDTH, BLOCK, RANKS)
        else:
            parts = _load_row(x, residual, buffer, rank, row, first, end, WIDTH, BLOCK, RANKS)
        value = _sum_row(parts, total.dtype.element_ty, RANKS)
        tl.store(total + row * WIDTH + columns, value, inside)
        row_normed = normalize_row(value.to(tl.float32), weights, eps, WIDTH, normed.dtype.element_ty)
        tl.store(normed + row * WIDTH + columns, row_normed, inside)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit(do_not_specialize=["rows", "chunk"])
def push_all_reduce_add_rms_norm_quantize_kernel(
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
    chunk: tl.tensor,
    eps: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    PREFETCH: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum rows over the ranks, add the residual, normalize the sums, and quantize them to FP8.

    Grid and arguments as ``push_all_reduce_add_rms_norm_kernel``; values, scales and bound as
    ``add_rms_norm_quantize_kernel``.
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = total.dtype.element_ty
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    first = channel * chunk
    end = tl.minimum(first + chunk, rows)
    buffer = own + plain_offset(epoch, channel, RANKS)
    _push_rows(x, own, peers, rank, channel, epoch, limit, first, end, ROW_LINES, LINES, RANKS, PTX)
    state = wait_for_flags(own, rank, channel, epoch, limit, 0, RANKS, PTX)
    if PREFETCH:
        following = _load_row(x, residual, buffer, rank, first, first, end, WIDTH, BLOCK, RANKS)
    for row in range(first, end):
        if PREFETCH:
            parts = following
            following = _load_row(x, residual, buffer, rank, row + 1, first, end, WIDTH, BLOCK, RANKS)
        else:
            parts = _load_row(x, residual, buffer, rank, row, first, end, WIDTH, BLOCK, RANKS)
        value = _sum_row(parts, dtype, RANKS)
        tl.store(total + row * WIDTH + columns, value, inside)
        normed = normalize_row(value.to(tl.float32), weights, eps, WIDTH, dtype).to(tl.float32)
        store_row(normed, values, scales, row, columns, bound, WIDTH)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit
def _push_rows(
    x: tl.tensor,
    own: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    limit: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    ROW_LINES: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Store rows ``first`` to ``end`` in this rank's region of every peer's plain buffer, and set the flag behind them.

    Nothing is stored once a wait has timed out.
    """
    stores = may_store(limit)
    if is_refresh(epoch) & stores:
        rewrite_words(own, peers, rank, channel, epoch, 0, LINES, RANKS, PTX)
    message = x.to(tl.pointer_type(tl.int64))
    region: tl.constexpr = _SLOT_BYTES // (RANKS * _LINE_BYTES) * _LINE_BYTES
    offset = plain_offset(epoch, channel, RANKS) + rank * region
    lines = (end - first) * ROW_LINES
    for start in range(0, lines, LINES):
        word_indices, inside = index_words(first * ROW_LINES, start, lines, end * ROW_LINES, LINES)
        words = tl.load(message + word_indices, inside, 0)
        for step in tl.static_range(RANKS - 1):
            store_plain(peers[step] + offset, start, words, inside & stores, LINES)
    set_flags(peers, rank, channel, epoch, stores, 0, RANKS, PTX)


@triton.jit
def _load_row(
    x: tl.tensor,
    residual: tl.tensor,
    buffer: tl.tensor,
    rank: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """Return a tuple of a row [BLOCK] of every rank, in rank order, and of the residual: zeros if there is no such row.

    ``buffer`` is the address of this rank's plain buffer, to which the peers pushed rows ``first`` to ``end``. They are
    loaded from L2: L1 may hold what was there before.
    """
    columns = tl.arange(0, BLOCK)
    inside = (columns < WIDTH) & (row < end)
    region: tl.constexpr = _SLOT_BYTES // (RANKS * _LINE_BYTES) * _LINE_BYTES
    row_bytes: tl.constexpr = WIDTH * x.dtype.element_ty.primitive_bitwidth // 8
    own = x.to(tl.int64) + row * row_bytes
    received = buffer + (row - first) * row_bytes
    parts: tl.tuple = ()
    for source in tl.static_range(RANKS):
        address = tl.where(rank == source, own, received + source * region)
        # Triton forgets that an address is aligned where it becomes a pointer.
        pointer = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
        part = tl.load(pointer + columns, inside, 0.0, cache_modifier=".cg")
        parts = parts + (part,)  # noqa: RUF005
    added = tl.load(residual + row * WIDTH + columns, inside, 0.0)
    return parts + (added,)  # noqa: RUF005


@triton.jit
def _sum_row(parts: tl.tensor, DTYPE: tl.constexpr, RANKS: tl.constexpr) -> tl.tensor:
    """Return, in ``DTYPE``, the rounded sum of a row of every rank, in rank order, plus the residual behind them."""
    total = parts[0].to(tl.float32)
    for each in tl.static_range(1, RANKS):
        total += parts[each].to(tl.float32)
    total = total.to(DTYPE).to(tl.float32) + parts[RANKS].to(tl.float32)
    return total.to(DTYPE)


def push_all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, memory: PeerMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the RMSNorm of the total, the total) of x [rows, n], summed over the ranks, and the residual.

    Both are contiguous, and ``fits_push_rows`` is true for them.
    """
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, width = x.shape
    chunk = triton.cdiv(rows, PROGRAMS)
    push_all_reduce_add_rms_norm_kernel[(triton.cdiv(rows, chunk),)](
        *(x, residual, weight, normed, total),
        *(memory.table, memory.epochs, memory.control, rows, chunk, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
        **_push_options(x, memory),
        **pdl_options(x.device),
    )
    return normed, total


def push_all_reduce_add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    memory: PeerMemory,
    bound: float = math.inf,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Return (the quantized RMSNorm of the total, the total), as ``push_all_reduce_add_rms_norm``."""
    rows, width = x.shape
    quantized = empty_quantized(x, width)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunk = triton.cdiv(rows, PROGRAMS)
    push_all_reduce_add_rms_norm_quantize_kernel[(triton.cdiv(rows, chunk),)](
        *(x, residual, weight, total, quantized.values, quantized.scales),
        *(memory.table, memory.epochs, memory.control, rows, chunk, eps, bound),
        **_push_options(x, memory),
        **row_options(x, width),
    )
    return quantized, total


def fits_push_rows(rows: int, row_bytes: int, ranks: int) -> bool:
    """Return whether these fused kernels can take the rows: the channels' plain buffers hold them."""
    region = push_capacity(ranks, two_shot=False) // CHANNELS
    return row_bytes % LINE_BYTES == 0 and triton.cdiv(rows, PROGRAMS) * row_bytes <= region


def _push_options(x: torch.Tensor, memory: PeerMemory) -> dict[str, Any]:
    row_bytes = x.shape[1] * x.itemsize
    registers = (memory.ranks + 1) * triton.next_power_of_2(x.shape[1]) * x.itemsize
    return {
        "ROW_LINES": row_bytes // LINE_BYTES,
        "LINES": TILE_LINES,
        "PREFETCH": registers <= PREFETCH_BYTES,
        "RANKS": memory.ranks,
        "PTX": memory.has_ptx,
    }
