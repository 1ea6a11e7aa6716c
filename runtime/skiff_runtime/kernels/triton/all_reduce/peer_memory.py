"""Peer memory: the buffers through which the ranks' all-reduce kernels exchange data, and their loads and stores.

Each rank has one allocation that all ranks map (symmetric memory). Rank r writes into the allocations of its peers
(push) and reads and polls its own only: a store crosses NVLink once, a load would cross it twice.

**Channels.** Program c of a kernel is channel c. It exchanges data with program c of the other ranks alone, through
memory, flags and an epoch of its own. A collective uses the first channels, as many as the shape of its message
decides; the ranks run the same collectives in the same order, so all of them use a channel equally often.

**Epochs and double buffering.** A call of a channel has the epoch k = 1, 2, 3, ...; the kernel itself counts, in the
rank's memory, so graph replays and eager calls count alike. Call k uses the buffers of parity k % 2, and every kernel
here observes two rules:

1. in call k a rank writes, in the memory of its peers, nothing but buffers of parity k % 2 and flags;
2. a rank ends call k only after it has received, from every peer, something that the peer sent in call k.

Invariant: when a rank writes in call k, every peer has ended its call k - 2, so it has read all that the buffers of
this parity held for it. Proof: the writer has ended call k - 1, so by rule 2 every peer had started call k - 1, which
it does only after its call k - 2 has ended. A rank that runs ahead therefore waits inside call k + 1 at the latest, and
no barrier is needed behind a read. Between two calls of a rank lies the boundary of two kernels of its stream, which
orders the reads of the one before the writes of the other.

**Two ways to know that data has arrived.**

- LL words (NCCL's low-latency protocol): each aligned 64-bit word holds 32 bits of data and the low 32 bits of the
  epoch, its mark. A 64-bit access is one access in PTX's memory model, so a word whose mark is the current epoch's
  holds the data of this call, whatever bits the data has; NaN and -0.0 need no care, and nothing is cleared. A mark is
  mistaken only if the word was last written 2^32 calls ago, or a multiple: in two of every 2^30 calls, one of each
  parity, every kernel therefore rewrites all words of its channel (``is_refresh``), whether it uses them or not, and
  those of the rank's own memory, too, which only ``gemv_all_reduce`` reads. Words that hold data of another kind would
  break this, so nothing else is stored there. Half of the bytes are marks, but the data needs no fence: it has arrived
  when it is there.
- Flags: data is stored plainly, then the flag of (phase, channel, source) is set to the 64-bit epoch behind a fence of
  system scope; the reader polls with acquire. Flags only grow, so a peer that is ahead does no harm. The fence costs a
  round trip, and every byte is data.

**Bounded waiting.** A rank that waits longer than ``control[TIMEOUT]`` stores the number of its collective in
``control[FAILED]`` and in the host's memory, and goes on with wrong data; all later waits then end at once. Only a barrier
goes on waiting, without a limit, because copies may follow it. The host looks before it uses the results of a step. A wait
that timed out breaks rule 2, and with it the invariant, so a third rule holds:

3. a rank sets no flag behind a wait that timed out, and in later calls its kernels store nothing at all in the memory of
   its peers.

Otherwise a peer that is only late could find the data of a later call behind flags that are large enough. By this rule
it completes the call that the rank has still sent in whole, and then times out and reports, too. Data without a flag
may still be stored in the call that timed out: its buffers are free, since the call before has ended by rule 2.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

CHANNELS: Final = 64
"""Programs of a launch, at most: fewer than any GPU here has multiprocessors, so that all of them run at a time. A
program waits for the same program of the other ranks, which must not wait for a free multiprocessor."""
MAX_RANKS: Final = 8
LINE_BYTES: Final = 16
"""Messages are cut into lines: what a thread loads or stores at a time. A line takes two LL words of 16 bytes."""
SLOT_LINES: Final = 2048
"""Lines of one message that a channel can receive as LL words."""
SLOT_BYTES: Final = 512 << 10
"""Bytes that a channel can receive plainly: of one message from every rank, or of the two phases of two-shot."""
FLAGS_BYTES: Final = 2 * CHANNELS * MAX_RANKS * 8
"""Both phases of two-shot have flags of their own."""
FAILED: Final = 0
TIMEOUT: Final = 1
"""Indices in ``PeerMemory.control``; the timeout is in nanoseconds, under Triton's interpreter in polls."""
COLLECTIVES: Final = {
    1: "one-shot all-reduce (LL)",
    2: "one-shot all-reduce",
    3: "two-shot all-reduce",
    4: "barrier of an exchange by copy engines",
}
"""Collectives by the number that a timeout reports."""

_CHANNELS = tl.constexpr(CHANNELS)
_MAX_RANKS = tl.constexpr(MAX_RANKS)
_SLOT_LINES = tl.constexpr(SLOT_LINES)
_SLOT_BYTES = tl.constexpr(SLOT_BYTES)
_FLAG_BYTES = tl.constexpr(8)
_WORD_BYTES = tl.constexpr(16)
_SOURCE_BYTES = tl.constexpr(CHANNELS * SLOT_LINES * 2 * LINE_BYTES)
"""The distance between the LL words of two sources."""
_FLAGS_SIZE = tl.constexpr(FLAGS_BYTES)
_REFRESH_PERIOD = tl.constexpr(1 << 30)
_LOW_HALF = tl.constexpr(0xFFFFFFFF)
WAITING = tl.constexpr(2)
TIMED_OUT = tl.constexpr(3)
"""States of a wait: 0 or 1, everything has arrived; 2, something has not; 3, nor will it be waited for any longer."""


def allocation_bytes(ranks: int) -> int:
    """Return the size of each rank's allocation: flags, LL words, and plain buffers, the latter two twice."""
    words = 2 * ranks * CHANNELS * SLOT_LINES * 2 * LINE_BYTES
    return FLAGS_BYTES + words + 2 * CHANNELS * SLOT_BYTES


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's view of the memory that ``ranks`` ranks share.

    ``addresses``: those of all ranks' allocations as this rank, ``rank``, maps them. ``table`` int64 [ranks + 2]: the
    same, the rank, and the address of an int64 of the host. ``epochs`` int64 [CHANNELS]: the channels' last epochs.
    ``control`` int64 [2]: see ``FAILED`` and ``TIMEOUT``.
    """

    ranks: int
    rank: int
    addresses: tuple[int, ...]
    table: torch.Tensor
    epochs: torch.Tensor
    control: torch.Tensor

    @property
    def has_ptx(self) -> bool:
        """Return whether kernels run on a GPU, not in Triton's interpreter."""
        return self.table.device.type == "cuda"


@triton.jit
def load_rank(table: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the rank that runs this kernel; it is not an argument, so that all ranks compile the same kernel."""
    return tl.load(table + RANKS)


@triton.jit
def load_peers(table: tl.tensor, rank: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return a tuple of the addresses of the other ranks' allocations, beginning behind this rank.

    All ranks push at the same time; in this order no two of them push to the same one.
    """
    peers: tl.tuple = ()
    for step in tl.static_range(RANKS - 1):
        peers = peers + (tl.load(table + (rank + 1 + step) % RANKS),)  # noqa: RUF005
    return peers


@triton.jit
def own_memory(table: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the address of this rank's allocation."""
    return tl.load(table + rank)


@triton.jit
def load_ranks(table: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return (the rank that runs this kernel, the addresses of its peers, that of its own memory), which no kernel writes."""
    rank = load_rank(table, RANKS)
    peers = load_peers(table, rank, RANKS)
    own = own_memory(table, rank)
    return rank, peers, own


@triton.jit
def start_call(epochs: tl.tensor, control: tl.tensor, channel: tl.tensor) -> tl.tensor:
    """Return (the epoch of the channel's call, how long a wait may take); ``end_call`` counts it."""
    epoch = tl.load(epochs + channel) + 1
    limit = wait_limit(control, "")
    return epoch, limit


@triton.jit
def wait_limit(control: tl.tensor, CACHE: tl.constexpr) -> tl.tensor:
    """Return how long a wait may take: no time once one has timed out. ``CACHE`` is the modifier of the loads."""
    failed = tl.load(control, cache_modifier=CACHE)
    return tl.where(failed != 0, -1, tl.load(control + 1, cache_modifier=CACHE))


@triton.jit
def may_store(limit: tl.tensor) -> tl.tensor:
    """Return whether rule 3 allows this call to store in the memory of peers; ``limit`` is that at its start.

    All programs of a launch see the same: they start long before one of them can time out.
    """
    return limit >= 0


@triton.jit
def words_offset(epoch: tl.tensor, source: tl.tensor, channel: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the offset of a channel's LL words from rank ``source``, of the parity of the epoch or of its low half."""
    slot = ((epoch & 1) * RANKS + source) * _CHANNELS + channel
    return _FLAGS_SIZE + slot * (_SLOT_LINES * 2 * _WORD_BYTES)


@triton.jit
def plain_offset(epoch: tl.tensor, channel: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the offset of a channel's plain buffer of the epoch's parity."""
    words: tl.constexpr = 2 * RANKS * _CHANNELS * _SLOT_LINES * 2 * _WORD_BYTES
    return _FLAGS_SIZE + words + ((epoch % 2) * _CHANNELS + channel) * _SLOT_BYTES


@triton.jit
def flags_offset(channel: tl.tensor, PHASE: tl.constexpr) -> tl.tensor:
    """Return the offset of a channel's flags of one phase, one for each source."""
    return (channel + PHASE * _CHANNELS) * (_MAX_RANKS * _FLAG_BYTES)


@triton.jit
def is_refresh(epoch: tl.tensor) -> tl.tensor:
    """Return whether all LL words of the channel are rewritten in this call: in one of each parity in 2^30 calls."""
    return epoch % _REFRESH_PERIOD < 2


@triton.jit
def rewrite_words(
    own: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    FIRST: tl.constexpr,
    LINES: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Store this call's mark in the channel's LL words on all ranks, for a call without data there.

    The first FIRST times 16 bytes are left out; LINES times 16 bytes are stored at a time.
    """
    offset = words_offset(epoch, rank, channel, RANKS)
    zero_words = tl.zeros((LINES,), tl.int64)
    for start in range(FIRST, _SLOT_LINES * 2, LINES):
        word = start + tl.arange(0, LINES)
        inside = word < _SLOT_LINES * 2
        store_words(own + offset + word * _WORD_BYTES, zero_words, epoch, inside, PTX)
        for step in tl.static_range(RANKS - 1):
            store_words(peers[step] + offset + word * _WORD_BYTES, zero_words, epoch, inside, PTX)


@triton.jit
def store_words(
    address: tl.tensor, words: tl.tensor, epoch: tl.tensor, active: tl.tensor, PTX: tl.constexpr
) -> None:
    """Store 8 bytes of data as two LL words, 16 bytes, at each active address.

    address, words      int64 tensors of one shape
    """
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b32 low, high;
            .reg .b64 first, second;
            setp.ne.b32 active, $4, 0;
            mov.b64 {low, high}, $2;
            mov.b64 first, {low, $3};
            mov.b64 second, {high, $3};
            @active st.relaxed.sys.global.v2.b64 [$1], {first, second};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r,r,~{memory}",
            [address, words, epoch.to(tl.int32), active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
        mark = epoch << 32
        tl.store(pointer, (words & _LOW_HALF) | mark, active)
        tl.store(pointer + 1, ((words >> 32) & _LOW_HALF) | mark, active)


@triton.jit
def load_words(address: tl.tensor, epoch: tl.tensor, active: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Load what ``store_words`` stored: (words int64, int32 that is not 0 where a mark is not the epoch's).

    Where an address is not active, nothing is loaded and nothing is missing.
    """
    if PTX:
        words, stale = tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b32 low, high, mark, other;
            .reg .b64 first, second;
            setp.ne.b32 active, $4, 0;
            mov.b32 low, 0;
            mov.b64 first, {low, $3};
            mov.b64 second, first;
            @active ld.relaxed.sys.global.v2.b64 {first, second}, [$2];
            mov.b64 {low, mark}, first;
            mov.b64 {high, other}, second;
            xor.b32 mark, mark, $3;
            xor.b32 other, other, $3;
            or.b32 $1, mark, other;
            mov.b64 $0, {low, high};
            }""",
            "=l,=r,l,r,r,~{memory}",
            [address, epoch.to(tl.int32), active.to(tl.int32)],
            dtype=(tl.int64, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
        mark = (epoch & _LOW_HALF) << 32
        first = tl.load(pointer, active, mark, volatile=True)
        second = tl.load(pointer + 1, active, mark, volatile=True)
        words = (first & _LOW_HALF) | (second << 32)
        stale = (((first ^ mark) >> 32) | ((second ^ mark) >> 32)).to(tl.int32)
    return words, stale


@triton.jit
def release(PTX: tl.constexpr) -> None:
    """Order everything that the program has stored before the flags that it sets next."""
    tl.debug_barrier()
    if PTX:  # by one thread: the barrier makes the stores of all threads its own (cumulativity)
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys;
            mov.b32 $0, 0;
            }""",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_once(address: tl.tensor, value: tl.tensor, active: tl.tensor, PTX: tl.constexpr) -> None:
    """Store one int64 at ``address`` by the program's first thread, if it is active there.

    It is the thread that runs the fence of ``release``. Where threads disagree about ``active``, its view is right: it is
    also the one that reports a timeout.
    """
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            setp.ne.and.b32 first, $3, 0, first;
            @first st.relaxed.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r,~{memory}",
            [address, value, active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), value, active)


@triton.jit
def load_flags(address: tl.tensor, active: tl.tensor, epoch: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Load flags int64 with acquire; one that is not active reads as ``epoch``."""
    if PTX:
        flags = tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b64 flag;
            setp.ne.b32 active, $2, 0;
            mov.b64 flag, $3;
            @active ld.acquire.sys.global.b64 flag, [$1];
            mov.b64 $0, flag;
            }""",
            "=l,l,r,l,~{memory}",
            [address, active.to(tl.int32), epoch],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        flags = tl.load(address.to(tl.pointer_type(tl.int64)), active, epoch, volatile=True)
    return flags


@triton.jit
def set_flags(
    peers: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    active: tl.tensor,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Let every peer know that what this program has stored in its memory is complete, if it is ``active``."""
    release(PTX)
    offset = flags_offset(channel, PHASE) + rank * _FLAG_BYTES
    for step in tl.static_range(RANKS - 1):
        store_once(peers[step] + offset, epoch, active, PTX)


@triton.jit
def wait_for_flags(
    own: tl.tensor,
    rank: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    limit: tl.tensor,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Wait for the flags of all peers; return the state of the wait. What they sent can be read then."""
    sources = tl.arange(0, _MAX_RANKS)
    active = (sources < RANKS) & (sources != rank)
    addresses = own + flags_offset(channel, PHASE) + sources * _FLAG_BYTES
    polls = tl.full((), 0, tl.int64)
    started = read_clock(polls, PTX)
    state = wait_state((load_flags(addresses, active, epoch, PTX) < epoch)[:, None], 0)
    while state == WAITING:
        polls += 1
        late = (read_clock(polls, PTX) - started > limit).to(tl.int32)
        state = wait_state((load_flags(addresses, active, epoch, PTX) < epoch)[:, None], late)
    tl.debug_barrier()  # a thread has acquired some flags; behind the barrier that holds for all threads
    return state


@triton.jit
def receive_words(
    own: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    active: tl.tensor,
    limit: tl.tensor,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Wait for LL words of all peers: (tuple of int64 tensors, ordered by rank without this one, state of the wait).

    own                 addresses where the words of rank 0 would be
    """
    polls = tl.full((), 0, tl.int64)
    started = read_clock(polls, PTX)
    words, state = _load_peer_words(own, rank, epoch, active, 0, RANKS, PTX)
    while state == WAITING:
        polls += 1
        late = (read_clock(polls, PTX) - started > limit).to(tl.int32)
        words, state = _load_peer_words(own, rank, epoch, active, late, RANKS, PTX)
    return words, state


@triton.jit
def _load_peer_words(
    own: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    active: tl.tensor,
    late: tl.tensor,
    RANKS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Load the LL words of all peers once: (tuple of int64 tensors, state).

    ``late`` is part of the state because each thread reads the clock for itself, and all must leave the loop together.
    """
    word, stale = load_words(own + find_source(0, rank) * _SOURCE_BYTES, epoch, active, PTX)
    words: tl.tuple = (word,)
    for step in tl.static_range(1, RANKS - 1):
        word, old = load_words(own + find_source(step, rank) * _SOURCE_BYTES, epoch, active, PTX)
        words = words + (word,)  # noqa: RUF005
        stale |= old
    return words, wait_state(stale != 0, late)


@triton.jit
def wait_state(stale: tl.tensor, late: tl.tensor) -> tl.tensor:
    """Return the state of a wait, from elements [N, M] that have not arrived, and int32 1 where the limit has passed.

    Threads differ in ``late`` when the limit passes between their reads of the clock. Hence the larger bit is that of
    ``stale``: the maximum shows a stale element, whichever thread is late, and no wait that times out looks complete.
    """
    return tl.max(tl.max(2 * stale.to(tl.int32) + late, 1), 0)


@triton.jit
def find_source(step: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return peer ``step`` of this rank, in rank order."""
    return step + (rank <= step).to(tl.int64)


@triton.jit
def sort_by_rank(words: tl.tensor, own: tl.tensor, rank: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Insert this rank's words into a tuple of the other ranks'."""
    ordered: tl.tuple = ()
    for each in tl.static_range(RANKS):
        below = words[each] if each < RANKS - 1 else words[RANKS - 2]
        above = words[each - 1] if each > 0 else words[0]
        word = tl.where(rank == each, own, tl.where(rank > each, below, above))
        ordered = ordered + (word,)  # noqa: RUF005
    return ordered


@triton.jit
def sum_lane(words: tl.tensor, LANE: tl.constexpr, DTYPE: tl.constexpr, RANKS: tl.constexpr) -> tl.tensor:
    """Sum one element of each 8-byte word over a tuple of all ranks' words, in rank order, in float32.

    Each rank sums in this order, so the sums have the same bits everywhere.
    """
    total = unpack_lane(words[0], LANE, DTYPE)
    for each in tl.static_range(1, RANKS):
        total += unpack_lane(words[each], LANE, DTYPE)
    return total


@triton.jit
def unpack_lane(word: tl.tensor, LANE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return element ``LANE`` of 8-byte words of ``DTYPE`` in float32."""
    if DTYPE.primitive_bitwidth == 16:
        value = (word >> (16 * LANE)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        value = (word >> (32 * LANE)).to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def pack_lane(value: tl.tensor, LANE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Round float32 values to ``DTYPE`` and return them as element ``LANE`` of words that are 0 elsewhere."""
    if DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        word = bits << (16 * LANE)
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & _LOW_HALF
        word = bits << (32 * LANE)
    return word


@triton.jit
def sum_words(words: tl.tensor, DTYPE: tl.constexpr, RANKS: tl.constexpr) -> tl.tensor:
    """Sum all elements of 8-byte words over a tuple of all ranks' words; each sum is rounded once."""
    total = pack_lane(sum_lane(words, 0, DTYPE, RANKS), 0, DTYPE)
    for lane in tl.static_range(1, 64 // DTYPE.primitive_bitwidth):
        total |= pack_lane(sum_lane(words, lane, DTYPE, RANKS), lane, DTYPE)
    return total


@triton.jit
def add_words(first: tl.tensor, second: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Add 8-byte words element by element in float32, and round."""
    pair = (first, second)
    return sum_words(pair, DTYPE, 2)


@triton.jit
def end_call(
    state: tl.tensor,
    epochs: tl.tensor,
    channel: tl.tensor,
    epoch: tl.tensor,
    control: tl.tensor,
    table: tl.tensor,
    COLLECTIVE: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Count this call of the channel, and report a wait that timed out."""
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + channel, epoch)
    if state == TIMED_OUT:
        tl.store(control, COLLECTIVE)
        tl.store(tl.load(table + RANKS + 1).to(tl.pointer_type(tl.int64)), COLLECTIVE)


@triton.jit
def read_clock(polls: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Return the GPU's time in nanoseconds; in the interpreter, the number of polls."""
    return globaltimer() if PTX else polls
