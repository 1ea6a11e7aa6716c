"""The tensor-parallel world of one model: ranks on one host, and the few collectives that layers need."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Final, Self

import torch
import torch.distributed as dist

from skiff_runtime.errors import StartupError

JOIN_TIMEOUT_SECONDS: Final = 1800.0
STORE_FILE: Final = "ranks.store"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


class TensorParallelGroup:
    """Rank ``rank`` of ``size`` on ``device``; with size 1 collectives return at once and no process group exists.

    A context manager: leaving it leaves the process group.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        size: int,
        device: str,
        run_dir: Path,
        timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
    ) -> "TensorParallelGroup":
        """Meet the other ranks in ``run_dir``, which must be new and private to them.

        ``device`` is ``cpu`` or ``cuda``, where rank i takes the GPU i. ``timeout_seconds``
        bounds the meeting and each collective. The ranks talk over the loopback interface.
        Raises ``StartupError`` when not all ranks come in time.
        """
        place = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if size > 1:
            _join(rank, size, place, run_dir / STORE_FILE, timedelta(seconds=timeout_seconds))
        return cls(rank, size, place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; ``tensor`` may be changed. On a CPU, short types are summed in float32."""
        if self.size == 1:
            return tensor
        if tensor.device.type == "cpu" and tensor.dtype != torch.float32:
            total = tensor.float()
            self._sum(total)
            return total.to(tensor.dtype)
        tensor = tensor.contiguous()
        self._sum(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, C] of every rank, side by side: [N, size * C], the same bits on every rank.

        Of one rank that is ``tensor``; of several it is put into ``out``, if given.
        """
        if self.size == 1:
            return tensor
        rows, columns = tensor.shape
        gathered = torch.empty((self.size * rows, columns), dtype=tensor.dtype, device=tensor.device)
        self._gather(gathered, tensor.contiguous())
        beside = gathered.view(self.size, rows, columns).transpose(0, 1)
        if out is None:
            return beside.reshape(rows, -1)
        return out.view(rows, self.size, columns).copy_(beside).view(rows, -1)

    def minimum(self, value: int) -> int:
        """The least value of all ranks; also a barrier."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box.item())

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _sum(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the sum over ranks."""
        dist.all_reduce(tensor)

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill ``gathered`` [size * N, C] with ``tensor`` [N, C] of every rank, one below the other."""
        dist.all_gather_into_tensor(gathered, tensor)


class DetachedRank(TensorParallelGroup):
    """A rank that computes its share and never meets the others: sums are its own part, what they would send is anything."""

    def _sum(self, tensor: torch.Tensor) -> None:
        """Leave the rank's own part."""

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Leave what is there."""


def _join(rank: int, size: int, device: torch.device, store: Path, timeout: timedelta) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            _BACKENDS[device.type],
            init_method=store.absolute().as_uri(),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise StartupError(f"rank {rank} of {size} could not meet the others: {error}") from error
