"""GEMV of a row-parallel layer, fused with the all-reduce of its output, the residual addition and RMSNorm.

The problem: in a decode step of one token, the sum behind a row-parallel product starts when the last program of the
GEMV has stored its output, loads what it stored, and only then sends it. The idea (fusing a product with its
collective: FLUX, Chang et al., 2024): every program of the GEMV stores its output, as an LL word, in the memory of all
ranks, this one included, so that a product is on its way while others are being computed. One program
of a second kernel receives the words of all ranks, sums them in rank order, adds the residual and normalizes. It starts as soon as
all programs of the GEMV run, and polls while they compute. In the meantime, and while the sum crosses NVLink, the memory
is idle; other programs of the second kernel then prefetch the weight of the next product.

Both kernels together are one call of channel 0 in the protocol of ``peer_memory``: the GEMV stores, and the second kernel
receives, counts the call and rewrites, when it is due, the words that hold no data. The GEMV lets the second kernel start
behind its own wait for the kernels ahead: before, that one could read the epoch or the residual too early. Nothing else
may be launched between the two.

The sums are those of ``gemv`` with the same tile followed by ``low_latency``, bit for bit. The norm is computed by twice
as many warps as the kernel that is not fused, so its last bit may differ; it has the same bits on all ranks.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    LINE_BYTES,
    SLOT_LINES,
    WAITING,
    PeerMemory,
    end_call,
    is_refresh,
    load_ranks,
    may_store,
    read_clock,
    rewrite_words,
    store_once,
    wait_limit,
    wait_state,
    words_offset,
)
from skiff_runtime.kernels.triton.linear.gemv import load_first_columns, multiply_rows
from skiff_runtime.kernels.triton.norm_act.rms_norm import normalize_row, row_warps
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.weight_prefetch import plan_prefetch, prefetch_weight
from skiff_runtime.kernels.tuning import GemvTile, tuning_for

WORD_BYTES: Final = 8
"""An LL word holds one output, whatever its type: a program of the GEMV has no neighbor to share it with."""
MAX_OUTPUTS: Final = SLOT_LINES * 2 * LINE_BYTES // WORD_BYTES
MAX_WARPS: Final = 32

_COLLECTIVE = tl.constexpr(1)
_WORD_BYTES = tl.constexpr(WORD_BYTES)
_REWRITE_LINES = tl.constexpr(1024)
_LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["rank"])
def gemv_push_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    addresses: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    rank: tl.tensor,
    INPUTS: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply one token with one row of the weight, or with two adjacent ones; store the products on all ranks.

    Grid: as ``gemv_kernel``, whose sums these are. Addresses and rank are arguments and not loaded from a table, because
    registers bound how many programs run at a time.

    x                   [INPUTS]
    weight              [outputs, INPUTS], rows ``weight_stride`` apart
    addresses           tuple of the addresses of all ranks' allocations
    epochs, control, PTX  as ``low_latency_all_reduce_kernel``; nothing is counted here
    """
    row = tl.program_id(0) * 2 if PAIR else tl.program_id(0)
    other = tl.minimum(row + 1, outputs - 1)
    source = weight + row.to(tl.int64) * weight_stride
    other_source = weight + other.to(tl.int64) * weight_stride
    first_weights = load_first_columns(source, other_source, INPUTS, PAIR, COLUMNS)
    wait_for_dependencies(PDL)
    launch_dependents(PDL)
    # The low halves, which are enough, take half as many registers while the product is computed.
    epoch = tl.load(epochs.to(tl.pointer_type(tl.int32))) + 1
    failed = tl.load(control.to(tl.pointer_type(tl.int32)))
    product, other_product = multiply_rows(x, source, other_source, first_weights, INPUTS, PAIR, COLUMNS)
    stores = failed == 0
    offset = words_offset(epoch, rank, 0, RANKS) + row * _WORD_BYTES
    word = _pack_word(product, epoch, x.dtype.element_ty)
    for target in tl.static_range(RANKS):
        store_once(addresses[target] + offset, word, stores, PTX)
    if PAIR:
        other_word = _pack_word(other_product, epoch, x.dtype.element_ty)
        active = stores & (row + 1 < outputs)
        for target in tl.static_range(RANKS):
            store_once(addresses[target] + offset + _WORD_BYTES, other_word, active, PTX)


@triton.jit(do_not_specialize_on_alignment=["next_weight"])
def receive_add_rms_norm_kernel(
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    next_weight: tl.tensor,
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LINES: tl.constexpr,
    STRIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Receive the products that ``gemv_push_kernel`` stores on all ranks; sum, add the residual, and normalize.

    Grid: (1 + programs that prefetch). The first program computes everything; its results are stored before the GEMV
    has ended, which has then computed them all. The others wait for that, in order to leave the memory to the GEMV.

    residual            [WIDTH]: written ahead of the GEMV
    weight              [WIDTH], of the norm
    normed              [WIDTH], written
    total               [WIDTH], written: the rounded sum over the ranks plus the residual, rounded
    next_weight, ROW_LINES, STRIDE, ROUNDS  as ``prefetch_weight``
    table, epochs, control, PTX  as ``low_latency_all_reduce_kernel``; the first epoch is counted
    BLOCK               WIDTH rounded up to a power of two
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    if program > 0:
        wait_for_dependencies(PDL)
        prefetch_weight(next_weight, program - 1, tl.num_programs(0) - 1, ROW_LINES, STRIDE, ROUNDS, PDL)
        return
    dtype = total.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    rank, peers, own = load_ranks(table, RANKS)
    channel = tl.full((), 0, tl.int64)
    # From L2: what the kernels ahead of the GEMV wrote, L1 shows for certain only behind this kernel's own wait.
    epoch = tl.load(epochs, cache_modifier=".cg") + 1
    limit = wait_limit(control, ".cg")
    added = tl.load(residual + columns, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    addresses = own + words_offset(epoch, 0, channel, RANKS) + columns * _WORD_BYTES
    distance = words_offset(epoch, 1, channel, RANKS) - words_offset(epoch, 0, channel, RANKS)
    summed, state = _receive_sum(addresses, distance, epoch, inside, limit, dtype, RANKS, PTX)
    rounded = (summed.to(dtype).to(tl.float32) + added).to(dtype)
    tl.store(total + columns, rounded, inside)
    row_normed = normalize_row(rounded.to(tl.float32), weights, eps, WIDTH, normed.dtype.element_ty)
    tl.store(normed + columns, row_normed, inside)
    if is_refresh(epoch) & may_store(limit):
        rewrite_words(own, peers, rank, channel, epoch, WIDTH // 2, _REWRITE_LINES, RANKS, PTX)
    wait_for_dependencies(PDL)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)


@triton.jit
def _receive_sum(
    addresses: tl.tensor,
    distance: tl.tensor,
    epoch: tl.tensor,
    active: tl.tensor,
    limit: tl.tensor,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Wait for the LL words of all ranks, this one included: (their sum in rank order, float32; state of the wait).

    addresses           int64 [N]: where the words of rank 0 are, those of the next rank ``distance`` bytes behind
    """
    polls = tl.full((), 0, tl.int64)
    started = read_clock(polls, PTX)
    summed, state = _load_sum(addresses, distance, epoch, active, 0, DTYPE, RANKS, PTX)
    while state == WAITING:
        polls += 1
        late = (read_clock(polls, PTX) - started > limit).to(tl.int32)
        summed, state = _load_sum(addresses, distance, epoch, active, late, DTYPE, RANKS, PTX)
    return summed, state


@triton.jit
def _load_sum(
    addresses: tl.tensor,
    distance: tl.tensor,
    epoch: tl.tensor,
    active: tl.tensor,
    late: tl.tensor,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Load the LL words of all ranks once: (their sum, state of the wait)."""
    bits, stale = _load_word(addresses, epoch, active, PTX)
    summed = _unpack_word(bits, DTYPE)
    for source in tl.static_range(1, RANKS):
        bits, old = _load_word(addresses + source * distance, epoch, active, PTX)
        summed += _unpack_word(bits, DTYPE)
        stale |= old
    return summed, wait_state((stale != 0)[:, None], late)


@triton.jit
def _load_word(address: tl.tensor, epoch: tl.tensor, active: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Load one LL word of each address: (its data int32, int32 that is not 0 if the mark is not the epoch's).

    Where an address is not active, nothing is loaded and nothing is missing.
    """
    if PTX:
        data, stale = tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b32 zero, mark;
            .reg .b64 word;
            setp.ne.b32 active, $4, 0;
            mov.b32 zero, 0;
            mov.b64 word, {zero, $3};
            @active ld.relaxed.sys.global.b64 word, [$2];
            mov.b64 {$0, mark}, word;
            xor.b32 $1, mark, $3;
            }""",
            "=&r,=&r,l,r,r,~{memory}",
            [address, epoch.to(tl.int32), active.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        mark = (epoch & _LOW_HALF) << 32
        word = tl.load(address.to(tl.pointer_type(tl.int64)), active, mark, volatile=True)
        data = word.to(tl.int32)
        stale = ((word ^ mark) >> 32).to(tl.int32)
    return data, stale


@triton.jit
def _pack_word(value: tl.tensor, epoch: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the LL word of one float32 value, rounded to ``DTYPE``, with the low half of the epoch as its mark."""
    if DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & _LOW_HALF
    return bits | (epoch.to(tl.int64) << 32)


@triton.jit
def _unpack_word(bits: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the value of an LL word's data in float32."""
    if DTYPE.primitive_bitwidth == 16:
        value = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


def gemv_all_reduce_add_rms_norm(
    x: torch.Tensor,
    matrix: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    memory: PeerMemory,
    *,
    next_matrix: torch.Tensor | None = None,
    tile: GemvTile | None = None,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the RMSNorm of the total, the total) of x [1, inputs] times matrix [n, inputs], summed, and the residual.

    All are contiguous but for the rows of the matrix, and ``fits_outputs`` is true for n. ``weight`` [n] is the norm's.
    A part of ``next_matrix``, that of the next product, is prefetched into the L2 cache. ``tile``, of the GEMV, and
    ``warps``, of the norm, replace the tuned ones.
    """
    inputs, outputs = x.shape[1], matrix.shape[0]
    device, tuning = x.device, tuning_for(x.device).gemv_all_reduce
    tile = tile or (tuning.tile if inputs <= tuning.short_inputs else tuning.long_tile)
    ranks = {"RANKS": memory.ranks, "PTX": memory.has_ptx}
    normed, total = (torch.empty_like(residual) for _ in range(2))
    prefetched = plan_prefetch(
        next_matrix,
        matrix,
        nbytes=tuning.prefetch_bytes,
        programs=tuning.prefetch_programs,
        stride=tuning.prefetch_row_stride,
    )
    gemv_push_kernel[(triton.cdiv(outputs, 2 if tile.pair else 1),)](
        *(x, matrix, memory.addresses, memory.epochs, memory.control, matrix.stride(0), outputs, memory.rank),
        INPUTS=inputs,
        PAIR=tile.pair,
        COLUMNS=min(tile.columns, triton.next_power_of_2(inputs)),
        num_warps=tile.warps,
        **ranks,
        **pdl_options(device),
    )
    receive_add_rms_norm_kernel[(1 + prefetched.programs,)](
        *(residual, weight, normed, total, prefetched.weight),
        *(memory.table, memory.epochs, memory.control, eps),
        WIDTH=outputs,
        BLOCK=triton.next_power_of_2(outputs),
        num_warps=warps or min(MAX_WARPS, 2 * row_warps(outputs)),
        **prefetched.options(),
        **ranks,
        **pdl_options(device),
    )
    return normed, total


def fits_outputs(outputs: int) -> bool:
    """Return whether the LL words of that many outputs, and whole lines of them, fit into a channel."""
    return 0 < outputs <= MAX_OUTPUTS and outputs % (LINE_BYTES // WORD_BYTES) == 0
