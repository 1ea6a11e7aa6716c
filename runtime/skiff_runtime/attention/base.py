"""The interface between models and attention: what a step looks like, and what a backend does with it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from skiff_runtime.kernels.shared_prefixes import SharedPrefixes
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.step import Int32


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """R rows that compute T tokens in all, row after row; the first ``decode_rows`` compute one each.

    On the host: row i computes ``lengths[i]`` tokens after ``starts[i]`` tokens whose K and V
    are in the cache already. On the device: ``rows`` int32[4, R] are the rows' lines in ``page_table``
    int32[slots, pages], starts, lengths and first tokens; ``contexts`` int32[R] are starts plus lengths.
    ``block_table`` int32[R, pages] repeats the rows' lines, where the backend wants them in order; ``shared`` tells what
    decode rows have in common, where it can make use of that.
    """

    starts: Int32
    lengths: Int32
    decode_rows: int
    rows: torch.Tensor
    contexts: torch.Tensor
    page_table: torch.Tensor
    block_table: torch.Tensor | None = None
    shared: SharedPrefixes | None = None

    def chunks(self) -> tuple[Int32, Int32]:
        """Lengths and contexts of the rows that do not decode, int32[R - decode_rows], on the host."""
        lengths = self.lengths[self.decode_rows :]
        return lengths, self.starts[self.decode_rows :] + lengths


class AttentionBackend(ABC):
    """Causal grouped-query attention over the paged KV cache."""

    needs_block_table = False
    """Whether ``AttentionBatch.block_table`` must be there."""
    shared_prefix_rows = 0
    """How many decode rows can read a common prefix together; 0: it has no use for that."""
    supports_cuda_graphs = False
    """Whether a step of decode rows alone needs nothing of the host, so that a CUDA graph can repeat it."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Get ready for one step; called once, before the layers' ``forward``."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with q [T, heads, d], when the pool holds the step's K and V of this layer.

        Returns [T, heads, d], which is ``into`` where that is given.
        """
