"""Memory that simulated ranks share: files that processes map on a CPU, or allocations of one GPU."""

from dataclasses import dataclass
from pathlib import Path

import torch

from skiff_runtime.distributed.all_reduce import make_peer_memory
from skiff_runtime.kernels.triton.all_reduce.peer_memory import FAILED, PeerMemory, allocation_bytes


@dataclass(frozen=True)
class SimulatedPeer:
    """One rank's view, the host's word to which its kernels report, and what must stay allocated."""

    memory: PeerMemory
    status: torch.Tensor
    buffers: list[torch.Tensor]

    @property
    def has_failed(self) -> bool:
        """Return whether a wait has timed out."""
        failed = bool(self.memory.control[FAILED].item())
        assert failed == bool(self.status.item()), "device and host know different things"
        return failed


def map_files(directory: Path, rank: int, ranks: int, *, polls: int) -> SimulatedPeer:
    """Map the memory of all ranks from sparse files in ``directory``, each process at addresses of its own.

    A wait of the interpreted kernels ends after ``polls`` polls.
    """
    size = allocation_bytes(ranks)
    buffers = [
        torch.from_file(str(directory / f"peer{each}"), shared=True, size=size, dtype=torch.uint8)
        for each in range(ranks)
    ]
    return _view(buffers, rank, torch.zeros(1, dtype=torch.int64), torch.device("cpu"), polls)


def allocate_on_gpu(ranks: int, *, timeout_seconds: float) -> list[SimulatedPeer]:
    """Return the views of ranks that share one GPU and one process."""
    device = torch.device("cuda", 0)
    buffers = [torch.zeros(allocation_bytes(ranks), dtype=torch.uint8, device=device) for _ in range(ranks)]
    peers = []
    for rank in range(ranks):
        status = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        peers.append(_view(buffers, rank, status, device, int(timeout_seconds * 1e9)))
    torch.cuda.synchronize()
    return peers


def _view(
    buffers: list[torch.Tensor], rank: int, status: torch.Tensor, device: torch.device, timeout: int
) -> SimulatedPeer:
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    memory = make_peer_memory(addresses, rank, status.data_ptr(), device, timeout=timeout)
    return SimulatedPeer(memory, status, buffers)
