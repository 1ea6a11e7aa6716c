"""Tensor-parallel ranks as threads of one process, whose collectives exchange tensors in memory: for many small cases."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Final, TypeVar

import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup

TIMEOUT_SECONDS: Final = 60.0
CPU: Final = torch.device("cpu")
Result = TypeVar("Result")


class Mailbox:
    """Tensors that the ranks hand to each other, one from each rank at a time."""

    def __init__(self, tp_size: int) -> None:
        self._sent: list[torch.Tensor] = [torch.empty(0)] * tp_size
        self._barrier = Barrier(tp_size, timeout=TIMEOUT_SECONDS)

    def share(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what every rank has sent, which is alike in shape and dtype; waits for all of them."""
        self._sent[rank] = tensor.clone()
        self._barrier.wait()
        received = list(self._sent)
        self._barrier.wait()
        assert all((each.shape, each.dtype) == (tensor.shape, tensor.dtype) for each in received)
        return received

    def abort(self) -> None:
        """Make all ranks that wait fail."""
        self._barrier.abort()


class ThreadRank(TensorParallelGroup):
    """A rank that is a thread; ``exchanged`` lists its collectives with the bytes that each rank contributed."""

    def __init__(self, tp_rank: int, tp_size: int, device: torch.device, mailbox: Mailbox) -> None:
        super().__init__(tp_rank, tp_size, device)
        self._mailbox = mailbox
        self.exchanged: list[tuple[str, int]] = []

    def _share(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.exchanged.append((name, tensor.nbytes))
        return self._mailbox.share(self.tp_rank, tensor)

    def _sum(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._share("sum", tensor)).sum(0))

    def _max(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._share("max", tensor)).amax(0))

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        gathered.copy_(torch.cat(self._share("gather", tensor)))

    def _all_to_all(self, received: torch.Tensor, tensor: torch.Tensor) -> None:
        parts = [each.chunk(self.tp_size)[self.tp_rank] for each in self._share("exchange", tensor)]
        received.copy_(torch.cat(parts))


def on_threads(
    tp_size: int, function: Callable[[ThreadRank], Result], device: torch.device = CPU
) -> Sequence[Result]:
    """Run ``function(group)`` on ``tp_size`` ranks, each on a thread; return the ranks' results."""
    mailbox = Mailbox(tp_size)

    def run(rank: int) -> Result:
        try:
            return function(ThreadRank(rank, tp_size, device, mailbox))
        except BaseException:
            mailbox.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(run, range(tp_size)))
