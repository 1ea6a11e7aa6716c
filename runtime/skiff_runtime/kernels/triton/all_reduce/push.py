"""One-shot and two-shot all-reduce of larger messages, pushed plainly behind flags.

One-shot: each rank pushes its whole message to every peer, and each sums all of them; (n - 1) * S bytes leave each of n
ranks for a message of S. Two-shot is a reduce-scatter and an all-gather: a rank pushes piece p to rank p, sums the
pieces that it receives, and pushes the sums to all; 2 * (n - 1) / n * S bytes leave each rank, in two phases. With two
ranks both move as much, and one-shot has one phase less. Sums are taken in rank order, in float32, and rounded once; in
two-shot by one rank alone for each element. The protocol, and why it is right, is in ``peer_memory``; one-shot fused
with the norm behind it is in ``push_norm``.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    CHANNELS,
    LINE_BYTES,
    SLOT_BYTES,
    TIMED_OUT,
    PeerMemory,
    end_call,
    find_source,
    is_refresh,
    load_ranks,
    may_store,
    plain_offset,
    rewrite_words,
    set_flags,
    sort_by_rank,
    start_call,
    sum_words,
    wait_for_flags,
)
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

TILE_LINES: Final = 1024
TILE_WARPS: Final = 32
"""Lines of one loop iteration, and the warps of a program: a line for each thread. Two H200, 1.3, 2.6 and 5.2 MB: 8.9, 13.1
and 21.3 us; 16 warps take 9.5, 14.1 and 23.2; 512 lines by 8 warps 8.9, 13.6 and 23.4."""
MIN_PROGRAM_LINES: Final = 512
"""Fewest lines of a program, where there are more programs than one. Untuned: a line for each thread."""
_SLOT_BYTES = tl.constexpr(SLOT_BYTES)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit(do_not_specialize=["lines", "piece_lines"])
def push_all_reduce_kernel(
    x: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    lines: tl.tensor,
    piece_lines: tl.tensor,
    TWO_SHOT: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Replace a message by its sum over the ranks.

    Grid: (programs), at most CHANNELS. A program takes a chunk of ``piece_lines`` lines, with TWO_SHOT as many for each
    rank. Its plain buffer holds one region for each source, with TWO_SHOT one for each source in each phase.

    x                   [lines * 16 bytes], overwritten
    table, epochs, control, PTX  as ``low_latency_all_reduce_kernel``
    LINES               lines of one loop iteration
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    stores = may_store(limit)
    message = x.to(tl.pointer_type(tl.int64))
    buffer = plain_offset(epoch, channel, RANKS)
    pieces: tl.constexpr = RANKS if TWO_SHOT else 1
    region: tl.constexpr = _SLOT_BYTES // ((2 * RANKS if TWO_SHOT else RANKS) * _LINE_BYTES) * _LINE_BYTES
    chunk = channel * piece_lines * pieces
    own_piece = chunk + (rank * piece_lines if TWO_SHOT else 0)
    if is_refresh(epoch) & stores:
        rewrite_words(own, peers, rank, channel, epoch, 0, LINES, RANKS, PTX)

    for start in range(0, piece_lines, LINES):
        for step in tl.static_range(RANKS - 1):
            target = (rank + 1 + step) % RANKS * piece_lines if TWO_SHOT else 0
            word_indices, inside = index_words(chunk + target, start, piece_lines, lines, LINES)
            words = tl.load(message + word_indices, inside, 0)
            store_plain(peers[step] + buffer + rank * region, start, words, inside & stores, LINES)
    set_flags(peers, rank, channel, epoch, stores, 0, RANKS, PTX)

    state = wait_for_flags(own, rank, channel, epoch, limit, 0, RANKS, PTX)
    for start in range(0, piece_lines, LINES):
        word_indices, inside = index_words(own_piece, start, piece_lines, lines, LINES)
        own_words = tl.load(message + word_indices, inside, 0)
        received: tl.tuple = ()
        for step in tl.static_range(RANKS - 1):
            source = find_source(step, rank)
            words = _load_plain(own + buffer + source * region, start, inside, LINES)
            received = received + (words,)  # noqa: RUF005
        ordered = sort_by_rank(received, own_words, rank, RANKS)
        summed = sum_words(ordered, x.dtype.element_ty, RANKS)
        tl.store(message + word_indices, summed, inside)
        if TWO_SHOT:
            region_offset = buffer + (RANKS + rank) * region
            for step in tl.static_range(RANKS - 1):
                store_plain(peers[step] + region_offset, start, summed, inside & stores, LINES)

    if TWO_SHOT:
        is_complete = stores & (state != TIMED_OUT)
        set_flags(peers, rank, channel, epoch, is_complete, 1, RANKS, PTX)
        limit = tl.where(state == TIMED_OUT, -1, limit)
        waited = wait_for_flags(own, rank, channel, epoch, limit, 1, RANKS, PTX)
        state = tl.maximum(state, waited)
        for start in range(0, piece_lines, LINES):
            for step in tl.static_range(RANKS - 1):
                source = find_source(step, rank)
                word_indices, inside = index_words(
                    chunk + source * piece_lines, start, piece_lines, lines, LINES
                )
                summed = _load_plain(own + buffer + (RANKS + source) * region, start, inside, LINES)
                tl.store(message + word_indices, summed, inside)
    collective: tl.constexpr = 3 if TWO_SHOT else 2
    end_call(state, epochs, channel, epoch, control, table, collective, RANKS)


@triton.jit
def index_words(
    first: tl.tensor, start: tl.tensor, end: tl.tensor, lines: tl.tensor, LINES: tl.constexpr
) -> tl.tensor:
    """Return (indices in the message of 8-byte words [LINES, 2], which of their lines exist [LINES, 1]).

    They are those of lines ``start`` to ``end``, at most LINES, of a piece that begins at line ``first``.
    """
    line = start + tl.arange(0, LINES)[:, None]
    inside = (line < end) & (first + line < lines)
    return (first + line) * 2 + tl.arange(0, 2)[None, :], inside


@triton.jit
def store_plain(
    region: tl.tensor, start: tl.tensor, words: tl.tensor, inside: tl.tensor, LINES: tl.constexpr
) -> None:
    """Store lines of a piece in a region of a peer's plain buffer."""
    tl.store(_line_pointers(region, start, LINES), words, inside)


@triton.jit
def _load_plain(region: tl.tensor, start: tl.tensor, inside: tl.tensor, LINES: tl.constexpr) -> tl.tensor:
    """Load lines that a peer has stored, from L2: L1 may hold what was there before."""
    return tl.load(_line_pointers(region, start, LINES), inside, 0, cache_modifier=".cg")


@triton.jit
def _line_pointers(region: tl.tensor, start: tl.tensor, LINES: tl.constexpr) -> tl.tensor:
    """Return pointers to the 8-byte words [LINES, 2] of the lines from ``start`` on in a region of a plain buffer."""
    words = (start + tl.arange(0, LINES)[:, None]) * 2 + tl.arange(0, 2)[None, :]
    # Triton forgets that an address is aligned where it becomes a pointer, and would load and store 8 bytes at a time.
    return tl.multiple_of(region.to(tl.pointer_type(tl.int64)), 16) + words


def push_all_reduce(x: torch.Tensor, memory: PeerMemory, *, two_shot: bool) -> None:
    """Replace ``x``, contiguous and of at most ``push_capacity`` bytes, by its sum over the ranks."""
    lines = x.nbytes // LINE_BYTES
    programs = min(CHANNELS, triton.cdiv(lines, MIN_PROGRAM_LINES))
    piece_lines = triton.cdiv(lines, programs * (memory.ranks if two_shot else 1))
    push_all_reduce_kernel[(programs,)](
        x,
        *(memory.table, memory.epochs, memory.control, lines, piece_lines),
        TWO_SHOT=two_shot,
        LINES=TILE_LINES,
        RANKS=memory.ranks,
        PTX=memory.has_ptx,
        num_warps=TILE_WARPS,
        **pdl_options(x.device),
    )


def push_capacity(ranks: int, *, two_shot: bool) -> int:
    """Return the bytes of the largest message that the channels can receive plainly."""
    region = SLOT_BYTES // ((2 * ranks if two_shot else ranks) * LINE_BYTES) * LINE_BYTES
    return CHANNELS * region * (ranks if two_shot else 1)
