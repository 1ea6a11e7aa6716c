"""Symmetric memory: one allocation on each rank of a process group, mapped by all of them (torch's private interface).

No other module imports or calls it. torch allocates by the driver's virtual memory functions and passes file
descriptors, or fabric handles, between the ranks through sockets in the temporary directory; so it also works where
allocations are expandable segments, which ``cudaIpcGetMemHandle`` refuses. Multicast is not used and is disabled in
torch: where it is off (``NCCL_NVLS_ENABLE=0``), setting it up fails.
"""

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from skiff_runtime.internals import Shape, borrowed

__all__ = ["SymmetricBuffer", "allocate", "map_peers"]

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

    def bytes_of_rank(self, rank: int) -> torch.Tensor:
        """Return a rank's memory, uint8 [n]."""
        view: torch.Tensor = self.handle.get_buffer(rank, tuple(self.memory.shape), torch.uint8)
        return view


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8 [nbytes] that peers can map; concerns this rank alone.

    Raises RuntimeError if there is no memory for it.
    """
    os.environ.setdefault(_NO_MULTICAST, "1")  # torch reads it when it maps the first buffer
    memory: torch.Tensor = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return memory


def map_peers(memory: torch.Tensor) -> SymmetricBuffer:
    """Map what ``allocate`` returned on every rank of the default process group.

    All ranks must call it, so all must have allocated. Raises RuntimeError if peer access is missing, or if the memory
    does not begin where its mapping does: torch may take it from a pool, whose bases are what the peers map.
    """
    assert dist.group.WORLD is not None
    handle = _symmetric_memory.rendezvous(memory, dist.group.WORLD)
    addresses = tuple(handle.buffer_ptrs)
    own = addresses[dist.get_rank()]
    if own != memory.data_ptr():
        raise RuntimeError(
            f"symmetric memory lies {memory.data_ptr() - own} bytes behind the base that peers map"
        )
    return SymmetricBuffer(memory, addresses, handle)
