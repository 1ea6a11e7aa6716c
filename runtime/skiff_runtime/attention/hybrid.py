"""Attention on a GPU: decode rows by one kernel, chunks of prompts by another."""

from abc import ABC, abstractmethod
from typing import Final

import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.kernels.triton.attention.decode_launch import Decode, max_group_rows
from skiff_runtime.kernels.triton.attention.prefill_attention import Prefill
from skiff_runtime.kernels.triton.runtime.cached_launch import LayerKV
from skiff_runtime.kvcache.kv_pool import KVPool

LONG_CONTEXT: Final = 4096
"""Tokens; from here on attention takes a GPU long, however few tokens attend."""


class Part(ABC):
    """What attends for one of the two kinds of rows."""

    needs_block_table = False
    shared_prefix_rows = 0

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Get ready for a step that has rows of this kind."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        """Attend with the tokens q [N, heads, d] of these rows; write the result, of the same shape, to ``into``."""


class HybridAttention(AttentionBackend):
    """Decode rows come first in a batch, chunks after them."""

    supports_cuda_graphs = True

    def __init__(self, pool: KVPool, prefill: Part, decode: Part) -> None:
        super().__init__(pool)
        self._prefill = prefill
        self._decode = decode
        self._decode_rows = 0
        self.needs_block_table = decode.needs_block_table
        self.shared_prefix_rows = decode.shared_prefix_rows

    def prepare(self, batch: AttentionBatch) -> None:
        self._decode_rows = batch.decode_rows
        if batch.decode_rows:
            self._decode.prepare(batch)
        if batch.decode_rows < len(batch.lengths):
            self._prefill.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        rows = self._decode_rows
        attended = torch.empty_like(q) if into is None else into
        if rows:
            self._decode.forward(layer, q[:rows], attended[:rows])
        if rows < q.shape[0]:
            self._prefill.forward(layer, q[rows:], attended[rows:])
        return attended


class _TritonPart(Part):
    """Our kernels: any page size, any type, no plan. What a step launches is found out in its first layer."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._batch: AttentionBatch | None = None
        self._launch: Decode | Prefill | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch, self._launch = batch, None

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        pool = self._pool.tokens(layer)
        if self._launch is None:
            assert self._batch is not None
            self._launch = self._launch_for(self._batch, q, pool)
        self._launch(q, pool, into)

    @abstractmethod
    def _launch_for(self, batch: AttentionBatch, q: torch.Tensor, pool: LayerKV) -> Decode | Prefill:
        """What the layers of a step launch, by the queries and the cache of one of them."""


class TritonDecode(_TritonPart):
    """One token a row."""

    def __init__(self, pool: KVPool, query_heads: int, longest: int) -> None:
        super().__init__(pool)
        self._longest = longest
        self.shared_prefix_rows = max_group_rows(query_heads, pool.layout.kv_heads)

    def _launch_for(self, batch: AttentionBatch, q: torch.Tensor, pool: LayerKV) -> Decode:
        return Decode(
            *(q, pool, batch.rows[0], batch.page_table, batch.contexts, self._pool.layout.page_size),
            longest=self._longest,
            shared=batch.shared,
        )


class TritonPrefill(_TritonPart):
    """Chunks of prompts."""

    def _launch_for(self, batch: AttentionBatch, q: torch.Tensor, pool: LayerKV) -> Prefill:
        first = batch.decode_rows
        return Prefill(
            *(q, pool, batch.rows[:, first:], batch.page_table, self._pool.layout.page_size),
            longest=int(batch.lengths[first:].max()),
            skipped=first,
        )


class PrefillBySize(Part):
    """Chunks of prompts by one of two parts: ``few`` is the quicker to launch, ``many`` the quicker on the GPU."""

    def __init__(self, few: Part, many: Part, *, most: int) -> None:
        """``few`` takes steps of up to ``most`` tokens of prompts, unless a context is long."""
        self._few, self._many, self._most = few, many, most
        self._chosen = many

    def prepare(self, batch: AttentionBatch) -> None:
        lengths, contexts = batch.chunks()
        are_few = int(lengths.sum()) <= self._most and int(contexts.max()) < LONG_CONTEXT
        self._chosen = self._few if are_few else self._many
        self._chosen.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        self._chosen.forward(layer, q, into)
