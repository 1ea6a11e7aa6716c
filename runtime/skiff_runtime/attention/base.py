"""The interface between models and attention: what a step looks like, and what a backend does with it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from skiff_runtime.step import Int32


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """R rows that compute T tokens in all, row after row.

    On the host: row i computes ``lengths[i]`` tokens after ``starts[i]`` tokens whose K and V
    are in the cache already. On the device: ``slots`` int64[R] are the rows' lines in
    ``page_table`` int32[slots, pages], ``locations`` int64[T] the places of the new
    tokens' K and V in the flat pool.
    """

    starts: Int32
    lengths: Int32
    slots: torch.Tensor
    page_table: torch.Tensor
    locations: torch.Tensor


class AttentionBackend(ABC):
    """Causal grouped-query attention over the paged KV cache."""

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Get ready for one step; called once, before the layers' ``forward``."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, kv_heads, d], then attend with q [T, heads, d]; returns [T, heads, d]."""
