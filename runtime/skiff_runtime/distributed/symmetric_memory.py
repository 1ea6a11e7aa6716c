"""Symmetric memory: one allocation on each rank of a process group, mapped by all of them (torch's private interface).

No other module imports or calls it. torch allocates by the driver's virtual memory functions and passes file
descriptors, or fabric handles, between the ranks through sockets in the temporary directory; so it also works where
allocations are expandable segments, which ``cudaIpcGetMemHandle`` refuses. Multicast is not used, and torch is told not
to set it up: where it is off (``NCCL_NVLS_ENABLE=0``), setting it up fails.
"""

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from skiff_runtime.internals import Shape, borrowed

__all__ = ["SymmetricBuffer", "allocate"]

NEEDED: Final[Shape] = {
    "torch.distributed._symmetric_memory:empty": (),
    "torch.distributed._symmetric_memory:rendezvous": ("tensor", "group"),
    "torch._C._distributed_c10d:_SymmetricMemory": ("buffer_ptrs", "get_buffer"),
}
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

with borrowed("torch", NEEDED):
    from torch.distributed import _symmetric_memory


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """This rank's ``memory`` uint8 [n], and the addresses of all ranks' as this rank maps them.

    The mappings last as long as ``handle``.
    """

    memory: torch.Tensor
    addresses: tuple[int, ...]
    handle: Any

    def of_rank(self, rank: int, count: int) -> torch.Tensor:
        """Return the first ``count`` int64 of a rank's memory."""
        view: torch.Tensor = self.handle.get_buffer(rank, (count,), torch.int64)
        return view


def allocate(nbytes: int, device: torch.device) -> SymmetricBuffer:
    """Allocate ``nbytes`` on every rank of the default process group; all ranks must call it.

    Raises RuntimeError if memory or peer access is missing.
    """
    os.environ.setdefault(_NO_MULTICAST, "1")  # torch reads it when it maps the first buffer
    memory = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    assert dist.group.WORLD is not None
    handle = _symmetric_memory.rendezvous(memory, dist.group.WORLD)
    return SymmetricBuffer(memory, tuple(handle.buffer_ptrs), handle)
