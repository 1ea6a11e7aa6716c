"""Attention on a GPU: decode rows by one kernel, chunks of prompts by another."""

from abc import ABC, abstractmethod

import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.kernels.fused import decode_attention, prefill_attention
from skiff_runtime.kvcache.pool import KVPool


class Part(ABC):
    """What attends for one of the two kinds of rows."""

    wants_block_table = False
    shared_rows = 0

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Get ready for a step that has rows of this kind."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with the tokens [N, heads, d] of these rows."""


class HybridAttention(AttentionBackend):
    """Decode rows come first in a batch, chunks after them."""

    holds_in_graphs = True

    def __init__(self, pool: KVPool, prefill: Part, decode: Part) -> None:
        super().__init__(pool)
        self._prefill = prefill
        self._decode = decode
        self._decode_rows = 0
        self.wants_block_table = decode.wants_block_table
        self.shared_rows = decode.shared_rows

    def prepare(self, batch: AttentionBatch) -> None:
        self._decode_rows = batch.decode_rows
        if batch.decode_rows:
            self._decode.prepare(batch)
        if batch.decode_rows < len(batch.lengths):
            self._prefill.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        rows = self._decode_rows
        if rows == 0:
            return self._prefill.forward(layer, q)
        if rows == q.shape[0]:
            return self._decode.forward(layer, q)
        return torch.cat((self._decode.forward(layer, q[:rows]), self._prefill.forward(layer, q[rows:])))


class TritonDecode(Part):
    """Our kernel: any page size, any type, no plan."""

    def __init__(self, pool: KVPool, query_heads: int, longest: int) -> None:
        self._pool = pool
        self._longest = longest
        self.shared_rows = decode_attention.members_of(query_heads, pool.layout.kv_heads)
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert self._batch is not None
        return decode_attention.decode(
            q,
            self._pool.tokens(layer),
            self._batch.rows[0],
            self._batch.page_table,
            self._batch.contexts,
            self._pool.layout.page_size,
            longest=self._longest,
            shared=self._batch.shared,
        )


class TritonPrefill(Part):
    """Our kernel: any page size, any type, no plan."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._batch: AttentionBatch | None = None
        self._longest = 0

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._longest = int(batch.lengths[batch.decode_rows :].max())

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert self._batch is not None
        return prefill_attention.prefill(
            q,
            self._pool.tokens(layer),
            self._batch.rows[:, self._batch.decode_rows :],
            self._batch.page_table,
            self._pool.layout.page_size,
            longest=self._longest,
            skipped=self._batch.decode_rows,
        )
