"""Peer-to-peer all-reduce between the GPUs of one host: the choice of an algorithm, and the memory that it needs.

The kernels are in ``kernels.triton.all_reduce``, the copies in ``copy_exchange``. All ranks sum by the same algorithm,
so it is chosen from what all ranks know alike: their number, and the shape and dtype of the message. Only peer access is
needed (NVLink, or PCIe where the driver allows it), no multicast.
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeVar

import torch

from skiff_runtime.distributed.copy_exchange import EXCHANGE_RANKS, CopyExchange, PendingExchange
from skiff_runtime.distributed.symmetric_memory import SymmetricBuffer, allocate, map_peers
from skiff_runtime.errors import CollectiveTimeout, SkiffError
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.triton.all_reduce.barrier import barrier
from skiff_runtime.kernels.triton.all_reduce.gemv_all_reduce import (
    fits_outputs,
    gemv_all_reduce_add_rms_norm,
)
from skiff_runtime.kernels.triton.all_reduce.low_latency import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_quantize,
    fits_rows,
    low_latency_all_reduce,
    low_latency_capacity,
)
from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    CHANNELS,
    COLLECTIVES,
    LINE_BYTES,
    MAX_RANKS,
    TIMEOUT,
    PeerMemory,
    allocation_bytes,
)
from skiff_runtime.kernels.triton.all_reduce.push import push_all_reduce, push_capacity
from skiff_runtime.kernels.triton.all_reduce.push_norm import (
    fits_push_rows,
    push_all_reduce_add_rms_norm,
    push_all_reduce_add_rms_norm_quantize,
)
from skiff_runtime.kernels.triton.linear import gemv
from skiff_runtime.kernels.triton.runtime.dependent_launch import supports_dependent_launch
from skiff_runtime.kernels.tuning import AllReduceLimits, tuning_for

NANOSECONDS: Final = 1_000_000_000
VERIFIED_BYTES: Final = 1 << 20
"""Of a buffer for copies, what is tried at the start."""
T = TypeVar("T")
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
DETACHED_ADDRESS: Final = 1 << 40
"""Stands for the memory of absent ranks. It has the width and the alignment of real addresses, so that kernels are compiled
for the same arguments."""

AllRanks = Callable[[bool], bool]
"""Returns whether all ranks pass True; also a barrier."""


class PeerMemoryUnavailable(SkiffError):
    """The GPUs cannot write into each other's memory. The message says why."""


class Algorithm(Enum):
    """An algorithm of all-reduce."""

    LOW_LATENCY = "one-shot, LL"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    COPY_ENGINES = "copy engines"
    NCCL = "NCCL"


def find_limits(ranks: int, limits: tuple[AllReduceLimits, ...]) -> AllReduceLimits | None:
    """Return the first limits that cover ``ranks`` ranks, or ``None`` if all are for fewer."""
    return next((each for each in limits if each.ranks >= ranks), None)


def choose_algorithm(
    nbytes: int, ranks: int, limits: tuple[AllReduceLimits, ...], exchange_capacity: int = 0
) -> Algorithm:
    """Return the algorithm that sums a message of ``nbytes`` bytes; it is NCCL if all limits are for fewer ranks.

    ``exchange_capacity`` is the largest message that copy engines exchange.
    """
    found = find_limits(ranks, limits)
    if found is None or nbytes == 0 or nbytes % LINE_BYTES:
        return Algorithm.NCCL
    if nbytes <= min(found.low_latency, low_latency_capacity()):
        return Algorithm.LOW_LATENCY
    if nbytes <= found.one_shot:
        return Algorithm.ONE_SHOT
    if nbytes <= found.two_shot:
        return Algorithm.TWO_SHOT
    return Algorithm.COPY_ENGINES if nbytes <= exchange_capacity else Algorithm.NCCL


class PeerToPeerAllReduce:
    """All-reduce of one rank over the memory that it shares with its peers.

    The ranks must run the same collectives of the same sizes in the same order, one after the other. Kernels count the
    calls on the device, so they may be launched, captured in graphs and replayed in any mixture.
    """

    def __init__(
        self,
        memory: PeerMemory,
        status: torch.Tensor,
        buffer: SymmetricBuffer | None = None,
        *,
        timeout_seconds: float = math.inf,
    ) -> None:
        """``status`` int64 [1] of the host is where ``memory``'s kernels report; ``buffer`` is kept alive.

        ``timeout_seconds`` is the limit that ``memory`` has.
        """
        self._memory = memory
        self._status = status
        self._buffer = buffer
        self._limits = tuning_for(memory.table.device).all_reduce
        self._timeout_seconds = timeout_seconds
        self._exchange: CopyExchange | None = None

    @classmethod
    def connect(
        cls, rank: int, ranks: int, device: torch.device, *, all_ranks: AllRanks, timeout_seconds: float
    ) -> "PeerToPeerAllReduce":
        """Map the memory of all ranks; all must call it, and rank i must be on GPU i.

        Raises ``PeerMemoryUnavailable`` on all ranks if it fails on one. Hence all agree after each stage that can fail
        on one rank alone, before they enter the next one together.
        """
        _raise_if_any_failed(all_ranks, _find_unsupported(rank, ranks))
        memory = _try_on_all(all_ranks, lambda: allocate(allocation_bytes(ranks), device))
        buffer = _try_on_all(all_ranks, lambda: map_peers(memory))
        _raise_if_any_failed(all_ranks, _verify_peer_writes(buffer, rank, ranks, all_ranks))
        status = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        view = make_peer_memory(
            buffer.addresses, rank, status.data_ptr(), device, timeout=int(timeout_seconds * NANOSECONDS)
        )
        created = cls(view, status, buffer, timeout_seconds=timeout_seconds)
        torch.cuda.synchronize(device)
        all_ranks(True)  # no rank writes into memory that is not zeroed yet
        return created

    @classmethod
    def detached(cls, ranks: int, device: torch.device) -> "PeerToPeerAllReduce":
        """Return one without peers, whose kernels can be compiled but not run."""
        table = torch.empty(ranks + 2, dtype=torch.int64, device=device)
        epochs = torch.empty(CHANNELS, dtype=torch.int64, device=device)
        control = torch.empty(2, dtype=torch.int64, device=device)
        memory = PeerMemory(ranks, 0, (DETACHED_ADDRESS,) * ranks, table, epochs, control)
        return cls(memory, torch.empty(1, dtype=torch.int64))

    def allocate_exchange(self, nbytes: int, all_ranks: AllRanks) -> None:
        """Allocate and map the memory by which copy engines exchange messages of up to ``nbytes`` bytes.

        All ranks must call it with the same size. Nothing is allocated for more than two ranks, or if kernels sum messages of
        this size. Larger messages than a limit are left to NCCL. Raises ``PeerMemoryUnavailable`` on all ranks if it fails on one.
        """
        device, ranks = self._memory.table.device, self._memory.ranks
        capacity = min(nbytes, tuning_for(device).copy_exchange.max_bytes)
        if (
            ranks != EXCHANGE_RANKS
            or choose_algorithm(capacity, ranks, self._limits, capacity) is not Algorithm.COPY_ENGINES
        ):
            return
        if self._exchange is not None and self._exchange.capacity >= capacity:
            return
        self._exchange = None
        memory = _try_on_all(all_ranks, lambda: allocate(capacity, device))
        buffer = _try_on_all(all_ranks, lambda: map_peers(memory))
        rank = self._memory.rank
        peer = buffer.bytes_of_rank(1 - rank)
        _raise_if_any_failed(all_ranks, _verify_copies(memory, peer, rank, all_ranks))
        self._exchange = CopyExchange(self._memory, memory, peer, buffer)

    def can_exchange(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Return whether messages of ``nbytes`` bytes are exchanged by copy engines."""
        return self._choose_for(nbytes, dtype) is Algorithm.COPY_ENGINES

    def start_exchange(self, message: torch.Tensor) -> PendingExchange:
        """Begin to exchange a contiguous message [T, n] for which ``can_exchange`` is true."""
        assert self._exchange is not None
        return self._exchange.start(message)

    def exchange(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x``, contiguous, and the other rank's until the next exchange, where ``can_exchange`` is true."""
        x = x.contiguous()
        exchange = self.start_exchange(x)
        exchange.send(slice(None))
        return x, exchange.finish()

    def choose(self, x: torch.Tensor) -> Algorithm:
        """Return the algorithm by which a message of the shape and dtype of ``x`` is summed."""
        return self._choose_for(x.nbytes, x.dtype)

    def can_reduce(self, x: torch.Tensor) -> bool:
        """Return whether messages of the shape and dtype of ``x`` are summed here, not by NCCL."""
        return self.choose(x) is not Algorithm.NCCL

    def can_fuse(self, x: torch.Tensor) -> bool:
        """Return whether the norm of rows [T, n] of the shape and dtype of ``x`` can be fused with their sum."""
        return self._choose_fused(x) is not None

    def can_fuse_gemv(self, x: torch.Tensor, matrix: torch.Tensor) -> bool:
        """Return whether ``gemv_add_rms_norm`` takes x [T, inputs] and matrix [n, inputs], of one dtype: T is 1."""
        outputs = matrix.shape[0]
        return (
            matrix.dtype == x.dtype
            and x.dtype in DTYPES
            and gemv.is_profitable(x, matrix)
            and fits_outputs(outputs)
            and choose_algorithm(outputs * x.itemsize, self._memory.ranks, self._limits)
            is Algorithm.LOW_LATENCY
            and supports_dependent_launch(x.device)
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, where ``can_reduce`` is true; ``x`` may be overwritten."""
        algorithm = self.choose(x)
        if algorithm is Algorithm.COPY_ENGINES:
            own, other = self.exchange(x)
            return own.add_(other)
        x = _aligned(x)
        if algorithm is Algorithm.LOW_LATENCY:
            low_latency_all_reduce(x, self._memory)
            return x
        two_shot = algorithm is Algorithm.TWO_SHOT
        capacity = push_capacity(self._memory.ranks, two_shot=two_shot)
        for part in torch.split(x.view(-1), capacity // x.itemsize):
            push_all_reduce(part, self._memory, two_shot=two_shot)
        return x

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what ``all_reduce`` and then ``kernels.rms_norm.add_rms_norm`` do, where ``can_fuse`` is true."""
        fused = (
            all_reduce_add_rms_norm
            if self._choose_fused(x) is Algorithm.LOW_LATENCY
            else push_all_reduce_add_rms_norm
        )
        return fused(_aligned(x), _aligned(residual), weight, eps, self._memory)

    def add_rms_norm_quantize(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bound: float
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Do what ``all_reduce`` and then ``kernels.fp8.add_rms_norm_quantize`` do, where ``can_fuse`` is true."""
        fused = (
            all_reduce_add_rms_norm_quantize
            if self._choose_fused(x) is Algorithm.LOW_LATENCY
            else push_all_reduce_add_rms_norm_quantize
        )
        return fused(_aligned(x), _aligned(residual), weight, eps, self._memory, bound)

    def gemv_add_rms_norm(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        next_matrix: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply x [1, inputs] with matrix [n, inputs] and do what ``add_rms_norm`` does, where ``can_fuse_gemv`` is true.

        A part of ``next_matrix``, that of the next product, is prefetched.
        """
        return gemv_all_reduce_add_rms_norm(
            x.contiguous(), matrix, residual.contiguous(), weight, eps, self._memory, next_matrix=next_matrix
        )

    def barrier(self) -> None:
        """Let the current stream wait for all ranks, as ``kernels.triton.all_reduce.barrier`` does."""
        barrier(self._memory)

    def set_timeout(self, seconds: float) -> None:
        """Bound how long a kernel waits for another rank, from its next launch or replay on."""
        self._timeout_seconds = seconds
        self._memory.control[TIMEOUT].fill_(int(seconds * NANOSECONDS))

    def check(self) -> None:
        """Raise ``CollectiveTimeout`` if a kernel has given up: results since then are wrong on this rank."""
        collective = int(self._status[0])
        if collective:
            raise CollectiveTimeout(
                f"{COLLECTIVES[collective]}: this rank waited for another one for longer than "
                f"{self._timeout_seconds:g} s"
            )

    def sample_sizes(self) -> list[int]:
        """Return sizes of messages, in bytes, that together launch every kernel that sums a message alone."""
        found = find_limits(self._memory.ranks, self._limits)
        if found is None:
            return []
        sizes = (found.low_latency, found.one_shot, found.two_shot)
        return [
            size
            for size in sizes
            if choose_algorithm(size, self._memory.ranks, self._limits) is not Algorithm.NCCL
        ]

    def sample_row_counts(self, row_bytes: int) -> list[int]:
        """Return the largest numbers of rows, of ``row_bytes`` bytes, that each limit of a fused sum allows."""
        found = find_limits(self._memory.ranks, self._limits)
        sizes = () if found is None else (found.fused_low_latency, found.fused_one_shot)
        return sorted({size // row_bytes for size in sizes} - {0})

    def _choose_fused(self, x: torch.Tensor) -> Algorithm | None:
        """Return the algorithm of the kernel that sums and normalizes rows [T, n] like ``x``; None if there is none for them."""
        (rows, width), ranks = x.shape, self._memory.ranks
        found, row_bytes = find_limits(ranks, self._limits), width * x.itemsize
        if found is None or self.choose(x) not in (Algorithm.LOW_LATENCY, Algorithm.ONE_SHOT):
            return None
        if x.nbytes <= min(found.fused_low_latency, low_latency_capacity()) and fits_rows(rows, row_bytes):
            return Algorithm.LOW_LATENCY
        if x.nbytes <= found.fused_one_shot and fits_push_rows(rows, row_bytes, ranks):
            return Algorithm.ONE_SHOT
        return None

    def _choose_for(self, nbytes: int, dtype: torch.dtype) -> Algorithm:
        if dtype not in DTYPES:
            return Algorithm.NCCL
        capacity = 0 if self._exchange is None else self._exchange.capacity
        return choose_algorithm(nbytes, self._memory.ranks, self._limits, capacity)


def make_peer_memory(
    addresses: tuple[int, ...], rank: int, status_address: int, device: torch.device, *, timeout: int
) -> PeerMemory:
    """Return the view of rank ``rank`` on memory at ``addresses``, one of each rank, all zeroed.

    ``timeout`` is in nanoseconds, in Triton's interpreter in polls.
    """
    return PeerMemory(
        ranks=len(addresses),
        rank=rank,
        addresses=addresses,
        table=torch.tensor([*addresses, rank, status_address], dtype=torch.int64, device=device),
        epochs=torch.zeros(CHANNELS, dtype=torch.int64, device=device),
        control=torch.tensor([0, timeout], dtype=torch.int64, device=device),
    )


def _find_unsupported(rank: int, ranks: int) -> str | None:
    """Return why peer memory cannot work, as far as is known before it is tried."""
    if ranks > MAX_RANKS:
        return f"it works for at most {MAX_RANKS} ranks"
    for peer in range(ranks):
        if peer != rank and not torch.cuda.can_device_access_peer(rank, peer):
            return f"GPU {rank} has no peer access to GPU {peer}"
    return None


def _raise_if_any_failed(all_ranks: AllRanks, failure: str | None) -> None:
    """Raise ``PeerMemoryUnavailable`` on all ranks if one has a failure."""
    if not all_ranks(failure is None):
        raise PeerMemoryUnavailable(failure or "it failed on another rank, whose log says why")


def _try_on_all(all_ranks: AllRanks, run: Callable[[], T]) -> T:
    """Return the result of ``run``; if it raises RuntimeError on a rank, raise ``PeerMemoryUnavailable`` on all."""
    try:
        result = run()
    except RuntimeError as error:
        _raise_if_any_failed(all_ranks, str(error).partition("\n")[0] or type(error).__name__)
        raise
    _raise_if_any_failed(all_ranks, None)
    return result


def _verify_peer_writes(buffer: SymmetricBuffer, rank: int, ranks: int, all_ranks: AllRanks) -> str | None:
    """Write to every peer and read what they wrote; return what is wrong. Leaves all memory zeroed.

    Where an IOMMU is in the way, peer access is reported and data is lost without an error.
    """

    def write() -> None:
        for peer in range(ranks):
            if peer != rank:
                buffer.of_rank(peer, ranks)[rank] = rank + 1

    _write_together(buffer.memory, write, all_ranks)
    seen = buffer.memory[: 8 * ranks].view(torch.int64).tolist()
    buffer.memory.zero_()
    torch.cuda.synchronize()
    wrong = [peer for peer in range(ranks) if seen[peer] != (0 if peer == rank else peer + 1)]
    return f"data that GPU {wrong[0]} wrote did not arrive on GPU {rank}" if wrong else None


def _verify_copies(received: torch.Tensor, peer: torch.Tensor, rank: int, all_ranks: AllRanks) -> str | None:
    """Copy into the other rank's buffer and read what it copied into this one; return what is wrong."""
    sample = received[:VERIFIED_BYTES]
    pattern = torch.full_like(sample, rank + 1)
    _write_together(sample, lambda: peer[:VERIFIED_BYTES].copy_(pattern), all_ranks)
    arrived = bool((sample == 2 - rank).all())
    return None if arrived else f"data that GPU {1 - rank} copied did not arrive on GPU {rank}"


def _write_together(own: torch.Tensor, write: Callable[[], object], all_ranks: AllRanks) -> None:
    """Zero this rank's memory, write to that of peers when all ranks have done so, and wait until all have written."""
    own.zero_()
    torch.cuda.synchronize()
    all_ranks(True)
    write()
    torch.cuda.synchronize()
    all_ranks(True)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous and at an address that lines can be read from."""
    x = x.contiguous()
    return x if x.data_ptr() % LINE_BYTES == 0 else x.clone()
