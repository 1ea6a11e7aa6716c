"""A barrier between the ranks, around copies into the memory of peers that no kernel makes.

Each rank sets a flag on every peer and waits for theirs; the protocol is in ``peer_memory``.
"""

from typing import Final

import triton
import triton.language as tl

from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    TIMED_OUT,
    PeerMemory,
    end_call,
    is_refresh,
    load_ranks,
    may_store,
    release,
    rewrite_words,
    set_flags,
    start_call,
    wait_for_flags,
)
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

REWRITE_LINES: Final = 128
"""LL words of 16 bytes that a loop iteration rewrites, a few for each thread of one warp; that happens twice in 2^30 calls."""
_COLLECTIVE = tl.constexpr(4)
_NO_LIMIT = tl.constexpr((1 << 63) - 1)


@triton.jit
def barrier_kernel(
    table: tl.tensor,
    epochs: tl.tensor,
    control: tl.tensor,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Wait until every rank's stream has come to this call.

    Grid: (1). A rank that has waited for too long reports it and goes on waiting: it must not end, because copies behind it
    would write into memory that a late peer still reads. The host ends its process.

    table, epochs, control, PTX  as ``low_latency_all_reduce_kernel``
    LINES               LL words of 16 bytes that a loop iteration rewrites
    """
    launch_dependents(PDL)
    channel = tl.program_id(0).to(tl.int64)
    rank, peers, own = load_ranks(table, RANKS)
    wait_for_dependencies(PDL)
    epoch, limit = start_call(epochs, control, channel)
    stores = may_store(limit)
    if is_refresh(epoch) & stores:
        rewrite_words(own, peers, rank, channel, epoch, 0, LINES, RANKS, PTX)
    set_flags(peers, rank, channel, epoch, stores, 0, RANKS, PTX)
    state = wait_for_flags(own, rank, channel, epoch, limit, 0, RANKS, PTX)
    end_call(state, epochs, channel, epoch, control, table, _COLLECTIVE, RANKS)
    if PTX & (state == TIMED_OUT):  # in the interpreter there are no copies behind it
        release(PTX)
        no_limit = tl.full((), _NO_LIMIT, tl.int64)
        wait_for_flags(own, rank, channel, epoch, no_limit, 0, RANKS, PTX)


def barrier(memory: PeerMemory) -> None:
    """Let the current stream wait until all ranks have launched the same barrier and everything ahead of it has ended."""
    barrier_kernel[(1,)](
        *(memory.table, memory.epochs, memory.control),
        LINES=REWRITE_LINES,
        RANKS=memory.ranks,
        PTX=memory.has_ptx,
        num_warps=1,
        **pdl_options(memory.table.device),
    )
