"""The interface between models and attention: the batch of one step, and the backend that attends over it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.qk_norm_rope import RopeInputs, qk_norm_rope_store_kv
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.step import Int32


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """R rows that compute T tokens in total, row after row; the first ``decode_rows`` compute one token each.

    On the host: row i computes ``lengths[i]`` tokens after ``starts[i]`` tokens whose K and V are in the cache already.
    On the device: ``rows`` int32[4, R] holds each row's line in ``page_table`` int32[slots, pages], its start, its
    length and the index of its first token among the T; ``seq_lens`` int32[R] are starts plus lengths. ``block_table``
    int32[R, pages] repeats the rows' lines of the page table in the order of the rows, for backends that need it so.
    ``shared_prefixes`` describes prefixes that decode rows share, for backends that read these once.
    """

    starts: Int32
    lengths: Int32
    decode_rows: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    block_table: torch.Tensor | None = None
    shared_prefixes: SharedPrefixes | None = None

    def prefill_rows(self) -> tuple[Int32, Int32]:
        """Return (lengths, sequence lengths) of the prefill rows, int32[R - decode_rows] each, on the host."""
        lengths = self.lengths[self.decode_rows :]
        return lengths, self.starts[self.decode_rows :] + lengths


class AttentionBackend(ABC):
    """Causal grouped-query attention over the paged KV cache.

    In a layer with a sliding window w (``pool.layout.window(layer)``), the token at position i attends to the tokens j
    with i - w < j <= i.
    """

    needs_block_table = False
    """``AttentionBatch.block_table`` must be set."""
    shared_prefix_rows = 0
    """Number of decode rows that can read a shared prefix together; 0 if the backend does not share prefixes."""
    supports_cuda_graphs = False
    """A step of decode rows alone needs nothing from the host, so a CUDA graph can replay it."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def describe(self) -> str:
        """Return the names of the implementations that were chosen."""
        return type(self).__name__

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Plan one step; called once, before the ``forward`` of its layers."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with q [T, heads, d], once the pool holds the step's K and V of this layer.

        Returns [T, heads, d], which is ``out`` if that is given.
        """

    def store_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rope: RopeInputs,
        norm_weights: torch.Tensor | None,
        norm_eps: float,
        expand: LoraExpand | None = None,
    ) -> torch.Tensor:
        """Normalize and rotate the heads of qkv [T, (heads + 2 * kv heads) * d] and store K and V; return q [T, heads, d].

        ``norm_weights``, ``norm_eps`` and ``expand`` are as ``qk_norm_rope_store_kv`` takes them.
        """
        return qk_norm_rope_store_kv(
            qkv,
            rope.cos_sin,
            rope.positions,
            norm_weights,
            norm_eps,
            self.pool.layer_kv(layer),
            rope.slot_mapping,
            expand,
        )

    def forward_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rope: RopeInputs,
        norm_weights: torch.Tensor | None,
        norm_eps: float,
        expand: LoraExpand | None = None,
    ) -> torch.Tensor:
        """Do ``store_qkv`` and attend with its result: [T, heads, d]."""
        return self.forward(layer, self.store_qkv(layer, qkv, rope, norm_weights, norm_eps, expand))
