"""The tensor-parallel process group of one model: its ranks on one host, and the collectives that layers need."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import torch
import torch.distributed as dist

from skiff_runtime import log
from skiff_runtime.config import AUTO, AllReduceBackend
from skiff_runtime.distributed.collective_environment import set_collective_environment
from skiff_runtime.errors import ConfigError, StartupError
from skiff_runtime.kernels.fp8 import add_rms_norm_quantize
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.rms_norm import add_rms_norm

if TYPE_CHECKING:
    from skiff_runtime.distributed.all_reduce import PeerToPeerAllReduce
    from skiff_runtime.distributed.copy_exchange import PendingExchange

STORE_FILE: Final = "ranks.store"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


class TensorParallelGroup:
    """Rank ``tp_rank`` of ``tp_size`` on ``device``.

    With a size of 1, collectives return at once and there is no process group. As a context manager it leaves the
    process group at the end. On GPUs that can write into each other's memory, sums of messages that are not too large
    are taken by kernels of ours and by copy engines (``distributed.all_reduce``), all others by NCCL.
    """

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, device: torch.device | None = None) -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.device = device or torch.device("cpu")
        self._peers: PeerToPeerAllReduce | None = None
        self._requires_peers = False

    @classmethod
    def start(
        cls,
        *,
        tp_rank: int,
        tp_size: int,
        device: str,
        run_dir: Path,
        timeout_seconds: float,
        all_reduce: AllReduceBackend = AUTO,
    ) -> "TensorParallelGroup":
        """Join the other ranks through a file in ``run_dir``, which must be new and private to them.

        ``device`` is ``cpu`` or ``cuda``, where rank i takes GPU i. ``timeout_seconds`` bounds the rendezvous and each
        collective. The ranks communicate over the loopback interface. Raises ``StartupError`` when not all ranks join
        in time, and ``ConfigError`` if ``all_reduce`` is ``p2p`` and the GPUs cannot write into each other's memory.
        """
        own = torch.device(device, tp_rank) if device == "cuda" else torch.device(device)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        if tp_size > 1:
            _join(tp_rank, tp_size, own, run_dir / STORE_FILE, timedelta(seconds=timeout_seconds))
        group = cls(tp_rank, tp_size, own)
        if own.type == "cuda" and tp_size > 1 and all_reduce != "nccl":
            group._connect_peers(timeout_seconds, required=all_reduce == "p2p")
        return group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; ``tensor`` may be overwritten. On a CPU, 16-bit types are summed in float32."""
        if self.tp_size == 1:
            return tensor
        if tensor.device.type == "cpu" and tensor.dtype != torch.float32:
            total = tensor.float()
            self._sum(total)
            return total.to(tensor.dtype)
        if self._peers is not None and self._peers.can_reduce(tensor):
            return self._peers.all_reduce(tensor)
        tensor = tensor.contiguous()
        self._sum(tensor)
        return tensor

    def allocate_exchange(self, nbytes: int) -> None:
        """Let the copy engines of two GPUs take part in sums of up to ``nbytes`` bytes that no kernel of ours takes.

        All ranks must call it. Where that fails, log why and leave these sums to NCCL, unless ``--all-reduce p2p`` requires it:
        then raise ``ConfigError``.
        """
        if self._peers is None:
            return
        from skiff_runtime.distributed.all_reduce import PeerMemoryUnavailable

        try:
            self._peers.allocate_exchange(nbytes, lambda ok: self.all_reduce_min(int(ok)) == 1)
        except PeerMemoryUnavailable as error:
            if self._requires_peers:
                raise ConfigError(
                    f"--all-reduce p2p: {error}; use a smaller --max-num-batched-tokens, or --all-reduce auto"
                ) from error
            log.event("large_all_reduce_by_nccl", reason=str(error))

    def can_exchange(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Return whether ``start_exchange`` takes messages of ``nbytes`` bytes; all ranks give the same answer."""
        return self._peers is not None and self._peers.can_exchange(nbytes, dtype)

    def start_exchange(self, message: torch.Tensor) -> "PendingExchange":
        """Begin to exchange a contiguous message [T, n] with the only other rank, chunk by chunk, where ``can_exchange`` is true.

        The sum of both is the sum over the ranks. No other collective may be called before the exchange has been finished.
        """
        assert self._peers is not None
        return self._peers.start_exchange(message)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the RMSNorm of the total, the total) of x [T, n], summed over the ranks, and the residual [T, n].

        ``x`` may be overwritten. Up to some hundred rows take one kernel; the results are those of ``all_reduce`` and then
        ``add_rms_norm``, bit for bit.
        """
        if self._peers is not None and self._peers.can_fuse(x):
            return self._peers.add_rms_norm(x, residual, weight, eps)
        part, other = self._sum_or_exchange(x)
        return add_rms_norm(part, residual, weight, eps, other=other)

    def can_fuse_linear(self, x: torch.Tensor, matrix: torch.Tensor) -> bool:
        """Return whether x [T, inputs] times matrix [n, inputs] can be fused with its sum, by its shape and dtype alone.

        All ranks have equal shares of the inputs, so all give the same answer.
        """
        return self._peers is not None and self._peers.can_fuse_gemv(x, matrix)

    def linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        next_matrix: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the RMSNorm of the total, the total) of x [1, inputs] times matrix [n, inputs], summed, and the residual.

        For products that ``can_fuse_linear`` allows. The total has the bits of the product by a GEMV with the same tile and
        ``all_reduce``, and the norm is that of ``add_rms_norm`` up to the rounding of a float32 sum; both have the same
        bits on every rank. A part of ``next_matrix``, that of the next product, is prefetched meanwhile.
        """
        assert self._peers is not None
        return self._peers.gemv_add_rms_norm(x, matrix, residual, weight, eps, next_matrix)

    def all_reduce_add_rms_norm_quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        bound: float = math.inf,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Do what ``all_reduce_add_rms_norm`` does, and quantize the norm to FP8."""
        if self._peers is not None and self._peers.can_fuse(x):
            return self._peers.add_rms_norm_quantize(x, residual, weight, eps, bound)
        part, other = self._sum_or_exchange(x)
        return add_rms_norm_quantize(part, residual, weight, eps, bound, other)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [N, C] of every rank along the columns: [N, tp_size * C], bit-identical on every rank.

        With one rank, return ``tensor`` itself.
        """
        if self.tp_size == 1:
            return tensor
        rows, columns = tensor.shape
        gathered = torch.empty((self.tp_size * rows, columns), dtype=tensor.dtype, device=tensor.device)
        self._gather(gathered, tensor.contiguous())
        return self._join_columns(gathered)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Divide rows among the ranks, and concatenate the columns of all ranks: [tp_size * N, C] -> [N, tp_size * C].

        Rank i keeps rows ``i * N`` to ``(i + 1) * N`` of every rank. With one rank, return ``tensor`` itself.
        """
        if self.tp_size == 1:
            return tensor
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._all_to_all(received, tensor.contiguous())
        return self._join_columns(received)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest of each element over the ranks; ``tensor``, of integers, may be overwritten.

        The messages are small, 8 bytes a row where tokens are sampled. A maximum depends on no order, so any
        algorithm gives the same bits on every rank.
        """
        if self.tp_size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._max(tensor)
        return tensor

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest value of all ranks; also a barrier."""
        if self.tp_size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box.item())

    def set_timeout(self, seconds: float) -> None:
        """Bound how long a peer-to-peer collective waits for another rank from now on; NCCL's bound stays."""
        if self._peers is not None:
            self._peers.set_timeout(seconds)

    def check(self) -> None:
        """Raise ``CollectiveTimeout`` if a peer-to-peer collective has given up, which makes its results wrong."""
        if self._peers is not None:
            self._peers.check()

    def close(self) -> None:
        """Leave the process group."""
        if self.tp_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _connect_peers(self, timeout_seconds: float, *, required: bool) -> None:
        """Map the memory of all ranks; where that fails, log why and leave all sums to NCCL, unless it is required."""
        from skiff_runtime.distributed.all_reduce import PeerMemoryUnavailable, PeerToPeerAllReduce

        self._requires_peers = required
        try:
            self._peers = PeerToPeerAllReduce.connect(
                self.tp_rank,
                self.tp_size,
                self.device,
                all_ranks=lambda ok: self.all_reduce_min(int(ok)) == 1,
                timeout_seconds=timeout_seconds,
            )
        except PeerMemoryUnavailable as error:
            if required:
                raise ConfigError(f"--all-reduce p2p: {error}; use --all-reduce nccl") from error
            log.event("all_reduce_by_nccl", reason=str(error))

    def _sum_or_exchange(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum over the ranks and None, or both ranks' parts of it, which the caller adds; see ``can_exchange``."""
        if self._peers is not None and self._peers.can_exchange(x.nbytes, x.dtype):
            return self._peers.exchange(x)
        return self.all_reduce(x), None

    def _sum(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks in place."""
        dist.all_reduce(tensor)

    def _max(self, tensor: torch.Tensor) -> None:
        """Replace each element of ``tensor`` by the largest over the ranks."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill ``gathered`` [tp_size * N, C] with ``tensor`` [N, C] of every rank, one below the other."""
        dist.all_gather_into_tensor(gathered, tensor)

    def _all_to_all(self, received: torch.Tensor, tensor: torch.Tensor) -> None:
        """Send the i-th of tp_size equal blocks of rows to rank i, and fill ``received`` with those of every rank."""
        dist.all_to_all_single(received, tensor)

    def _join_columns(self, blocks: torch.Tensor) -> torch.Tensor:
        """Put tp_size blocks [N, C], one below the other, side by side: [N, tp_size * C]."""
        return blocks.view(self.tp_size, -1, blocks.shape[1]).transpose(0, 1).flatten(1)


class DetachedRank(TensorParallelGroup):
    """A rank without its group, which computes its own shard alone.

    A sum or maximum is the rank's own part, and the other ranks' parts of a gathered or exchanged tensor are undefined.
    It shows the shapes of a rank's tensors where there are no other ranks, and on a GPU that is not there the kernels
    that sum them.
    """

    def __init__(self, tp_rank: int, tp_size: int, device: torch.device | None = None) -> None:
        super().__init__(tp_rank, tp_size, device)
        if self.device.type == "cuda" and tp_size > 1:
            from skiff_runtime.distributed.all_reduce import PeerToPeerAllReduce
            from skiff_runtime.kernels.triton.all_reduce.peer_memory import MAX_RANKS

            if tp_size <= MAX_RANKS:
                self._peers = PeerToPeerAllReduce.detached(tp_size, self.device)

    def sample_messages(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return tensors whose sums together launch every kernel that sums a message alone."""
        sizes = [] if self._peers is None else self._peers.sample_sizes()
        return [torch.empty(size // dtype.itemsize, dtype=dtype, device=self.device) for size in sizes]

    def sample_rows(self, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return rows [T, width] whose sums, with the norm behind them, together launch every fused kernel."""
        counts = [] if self._peers is None else self._peers.sample_row_counts(width * dtype.itemsize)
        return [torch.empty((rows, width), dtype=dtype, device=self.device) for rows in counts]

    def launch_barrier(self) -> None:
        """Launch the kernel on which exchanges by copy engines wait."""
        if self._peers is not None:
            self._peers.barrier()

    @contextmanager
    def without_peers(self) -> Iterator[None]:
        """Leave all sums to NCCL for a while."""
        peers, self._peers = self._peers, None
        try:
            yield
        finally:
            self._peers = peers

    def _sum(self, tensor: torch.Tensor) -> None:
        """Keep the rank's own part."""

    def _max(self, tensor: torch.Tensor) -> None:
        """Keep the rank's own part."""

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Leave ``gathered`` as it is."""

    def _all_to_all(self, received: torch.Tensor, tensor: torch.Tensor) -> None:
        """Leave ``received`` as it is."""


def _join(tp_rank: int, tp_size: int, device: torch.device, store: Path, timeout: timedelta) -> None:
    set_collective_environment()
    try:
        dist.init_process_group(
            _BACKENDS[device.type],
            init_method=store.absolute().as_uri(),
            rank=tp_rank,
            world_size=tp_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise StartupError(f"rank {tp_rank} of {tp_size} could not join the other ranks: {error}") from error
