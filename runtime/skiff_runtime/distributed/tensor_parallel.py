"""The tensor-parallel process group of one model: its ranks on one host, and the collectives that layers need."""

from datetime import timedelta
from pathlib import Path
from typing import Final, Self

import torch
import torch.distributed as dist

from skiff_runtime.distributed.collective_environment import set_collective_environment
from skiff_runtime.errors import StartupError

STORE_FILE: Final = "ranks.store"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


class TensorParallelGroup:
    """Rank ``tp_rank`` of ``tp_size`` on ``device``.

    With a size of 1, collectives return at once and there is no process group. As a context manager it leaves the
    process group at the end.
    """

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, device: torch.device | None = None) -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.device = device or torch.device("cpu")

    @classmethod
    def start(
        cls,
        *,
        tp_rank: int,
        tp_size: int,
        device: str,
        run_dir: Path,
        timeout_seconds: float,
    ) -> "TensorParallelGroup":
        """Join the other ranks through a file in ``run_dir``, which must be new and private to them.

        ``device`` is ``cpu`` or ``cuda``, where rank i takes GPU i. ``timeout_seconds`` bounds the rendezvous and each
        collective. The ranks communicate over the loopback interface. Raises ``StartupError`` when not all ranks join
        in time.
        """
        own = torch.device(device, tp_rank) if device == "cuda" else torch.device(device)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        if tp_size > 1:
            _join(tp_rank, tp_size, own, run_dir / STORE_FILE, timedelta(seconds=timeout_seconds))
        return cls(tp_rank, tp_size, own)

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
        tensor = tensor.contiguous()
        self._sum(tensor)
        return tensor

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
        self._exchange(received, tensor.contiguous())
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

    def close(self) -> None:
        """Leave the process group."""
        if self.tp_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _sum(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks in place."""
        dist.all_reduce(tensor)

    def _max(self, tensor: torch.Tensor) -> None:
        """Replace each element of ``tensor`` by the largest over the ranks."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill ``gathered`` [tp_size * N, C] with ``tensor`` [N, C] of every rank, one below the other."""
        dist.all_gather_into_tensor(gathered, tensor)

    def _exchange(self, received: torch.Tensor, tensor: torch.Tensor) -> None:
        """Send the i-th of tp_size equal blocks of rows to rank i, and fill ``received`` with those of every rank."""
        dist.all_to_all_single(received, tensor)

    def _join_columns(self, blocks: torch.Tensor) -> torch.Tensor:
        """Put tp_size blocks [N, C], one below the other, side by side: [N, tp_size * C]."""
        return blocks.view(self.tp_size, -1, blocks.shape[1]).transpose(0, 1).flatten(1)


class DetachedRank(TensorParallelGroup):
    """A rank without its group, which computes its own shard alone.

    A sum or maximum is the rank's own part, and the other ranks' parts of a gathered or exchanged tensor are undefined.
    It shows the shapes of a rank's tensors where there are no other ranks.
    """

    def _sum(self, tensor: torch.Tensor) -> None:
        """Keep the rank's own part."""

    def _max(self, tensor: torch.Tensor) -> None:
        """Keep the rank's own part."""

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Leave ``gathered`` as it is."""

    def _exchange(self, received: torch.Tensor, tensor: torch.Tensor) -> None:
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
