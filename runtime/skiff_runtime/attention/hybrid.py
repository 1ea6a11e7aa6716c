"""Attention on a GPU: one implementation for decode rows, another for prefill rows."""

from abc import ABC, abstractmethod

import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.kernels.triton.attention.decode_attention import (
    DecodeAttention,
    DecodeRows,
    max_group_rows,
)
from skiff_runtime.kernels.triton.attention.fused_decode_attention import (
    FusedDecodeAttention,
    is_fusion_profitable,
)
from skiff_runtime.kernels.triton.attention.prefill_attention import PrefillAttention
from skiff_runtime.kernels.triton.attention.qk_norm_rope import launches_dependents_late
from skiff_runtime.kernels.triton.runtime.cached_launch import LayerKV
from skiff_runtime.kvcache.kv_pool import KVPool


class PhaseAttention(ABC):
    """Attention for the rows of one phase, prefill or decode. The attributes are those of ``AttentionBackend``."""

    needs_block_table = False
    shared_prefix_rows = 0

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Plan a step that has rows of this phase."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend with q [N, heads, d], the tokens of these rows, and write the result to ``out``, of the same shape."""

    def forward_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rope: RopeInputs,
        norm_weights: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor | None:
        """Do what ``AttentionBackend.forward_qkv`` does, for a step of this phase alone; None where that is not faster."""
        return None


class HybridAttention(AttentionBackend):
    """Splits a batch into its decode rows, which come first, and its prefill rows."""

    supports_cuda_graphs = True

    def __init__(self, pool: KVPool, prefill: PhaseAttention, decode: PhaseAttention) -> None:
        super().__init__(pool)
        self._prefill = prefill
        self._decode = decode
        self._decode_rows = 0
        self.needs_block_table = decode.needs_block_table
        self.shared_prefix_rows = decode.shared_prefix_rows

    def describe(self) -> str:
        return f"{type(self._prefill).__name__},{type(self._decode).__name__}"

    def prepare(self, batch: AttentionBatch) -> None:
        self._decode_rows = batch.decode_rows
        if batch.decode_rows:
            self._decode.prepare(batch)
        if batch.decode_rows < len(batch.lengths):
            self._prefill.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = (
            self._decode_rows
        )  # a decode row is one token, so this is also the index of the first prefill token
        out = torch.empty_like(q) if out is None else out
        if rows:
            self._decode.forward(layer, q[:rows], out[:rows])
        if rows < q.shape[0]:
            self._prefill.forward(layer, q[rows:], out[rows:])
        return out

    def forward_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rope: RopeInputs,
        norm_weights: torch.Tensor | None,
        norm_eps: float,
        expand: LoraExpand | None = None,
    ) -> torch.Tensor:
        if expand is None and self._decode_rows == len(qkv):
            attended = self._decode.forward_qkv(layer, qkv, rope, norm_weights, norm_eps)
            if attended is not None:
                return attended
        return super().forward_qkv(layer, qkv, rope, norm_weights, norm_eps, expand)


class _TritonAttention(PhaseAttention):
    """Our kernels, for any page size and dtype.

    They need no plan: a step's launches are prepared in the first of the layers that have the same sliding window.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._batch: AttentionBatch | None = None
        self._launches: dict[int | None, DecodeAttention | PrefillAttention] = {}

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch, self._launches = batch, {}

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        kv, window = self._pool.layer_kv(layer), self._pool.layout.window(layer)
        launch = self._launches.get(window)
        if launch is None:
            assert self._batch is not None
            launch = self._launches[window] = self._make_launch(self._batch, q, kv, window)
        launch(q, kv, out)

    @abstractmethod
    def _make_launch(
        self, batch: AttentionBatch, q: torch.Tensor, kv: LayerKV, window: int | None
    ) -> DecodeAttention | PrefillAttention:
        """Prepare the launch of all layers with this window, from the queries and the KV cache of one of them."""


class TritonDecode(_TritonAttention):
    """Decode rows: one token each.

    Shared prefixes are read together in layers with full attention only. In a layer with a window, each row reads its
    own: the windows of a group's rows begin at different tokens, and bound what each of them reads anyway.
    """

    def __init__(self, pool: KVPool, query_heads: int, max_model_len: int) -> None:
        super().__init__(pool)
        self._max_model_len = max_model_len
        self._fused_launches: dict[tuple[int | None, bool], FusedDecodeAttention] = {}
        if None in pool.layout.distinct_windows:
            self.shared_prefix_rows = max_group_rows(pool.device, query_heads, pool.layout.kv_heads)

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(batch)
        self._fused_launches = {}

    def forward_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rope: RopeInputs,
        norm_weights: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor | None:
        batch, kv, window = self._batch, self._pool.layer_kv(layer), self._pool.layout.window(layer)
        assert batch is not None
        if batch.shared_prefixes is not None or not is_fusion_profitable(qkv, kv):
            return None
        kind = window, norm_weights is not None
        launch = self._fused_launches.get(kind)
        if launch is None:
            launch = self._fused_launches[kind] = FusedDecodeAttention(
                *(qkv, kv, self._decode_rows(batch), rope, None if norm_weights is None else norm_eps),
                max_seq_len=self._max_model_len,
                window=window,
            )
        return launch(qkv, norm_weights, kv)

    def _decode_rows(self, batch: AttentionBatch) -> DecodeRows:
        return DecodeRows(batch.rows[0], batch.page_table, batch.seq_lens, self._pool.layout.page_size)

    def _make_launch(
        self, batch: AttentionBatch, q: torch.Tensor, kv: LayerKV, window: int | None
    ) -> DecodeAttention:
        shared = batch.shared_prefixes if window is None else None
        return DecodeAttention(
            q,
            kv,
            self._decode_rows(batch),
            max_seq_len=self._max_model_len,
            shared=shared,
            window=window,
            # The kernel ahead stores the K and V of all of the step's tokens.
            early_tables=shared is None and launches_dependents_late(int(batch.lengths.sum())),
        )


class TritonPrefill(_TritonAttention):
    """Prefill rows: chunks of prompts."""

    def _make_launch(
        self, batch: AttentionBatch, q: torch.Tensor, kv: LayerKV, window: int | None
    ) -> PrefillAttention:
        first = batch.decode_rows
        return PrefillAttention(
            *(q, kv, batch.rows[:, first:], batch.page_table, self._pool.layout.page_size),
            max_chunk_len=int(batch.lengths[first:].max()),
            skipped=first,
            window=window,
        )


class PrefillBySize(PhaseAttention):
    """Prefill by one of two implementations: ``small`` is launched sooner, ``large`` computes faster on the GPU."""

    def __init__(
        self, small: PhaseAttention, large: PhaseAttention, *, max_small_tokens: int, long_context: int
    ) -> None:
        """``small`` takes steps of up to ``max_small_tokens`` tokens whose contexts are below ``long_context``."""
        self._small, self._large = small, large
        self._max_small_tokens, self._long_context = max_small_tokens, long_context
        self._chosen = large

    def prepare(self, batch: AttentionBatch) -> None:
        lengths, seq_lens = batch.prefill_rows()
        is_small = int(lengths.sum()) <= self._max_small_tokens and int(seq_lens.max()) < self._long_context
        self._chosen = self._small if is_small else self._large
        self._chosen.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._chosen.forward(layer, q, out)
