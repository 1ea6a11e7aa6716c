"""The self-attention block of a decoder layer: its projections around an attention backend."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    shard_evenly,
    shard_or_replicate,
)
from skiff_runtime.layers.lora import LinearOutput, LoraLayer, split_deferred
from skiff_runtime.layers.norm import QKNorm, QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import LayerOutput
from skiff_runtime.layers.sharding import LayerContext, WeightShard


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Numbers of heads of the whole model, and their dimension."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def local_heads(self, tp_size: int) -> int:
        """Return the number of query heads of one rank."""
        return self.num_heads // tp_size

    def local_kv_heads(self, tp_size: int) -> int:
        """Return the number of KV heads of one rank; with fewer heads than ranks, each rank holds a copy of one."""
        return max(1, self.num_kv_heads // tp_size)


class Attention:
    """[T, hidden] -> [T, hidden], with rotary positions; writes the tokens' K and V through the backend.

    With ``logits_indices`` int[S] the result is [S, hidden], that of the tokens at these indices.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: AttentionHeads,
        context: LayerContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        self._layer, self._hidden_size = layer, hidden_size
        query_size = heads.num_heads * heads.head_dim
        modules = [
            shard_evenly("q_proj", query_size, context),
            shard_or_replicate("k_proj", heads.num_kv_heads, heads.head_dim, context),
            shard_or_replicate("v_proj", heads.num_kv_heads, heads.head_dim, context),
        ]
        self._qkv_proj = ColumnParallelLinear(
            hidden_size, modules, bias=qkv_bias, context=context.for_projection(layer, "qkv_proj")
        )
        self._o_proj = RowParallelLinear(
            "o_proj",
            query_size,
            hidden_size,
            bias=output_bias,
            context=context.for_projection(layer, "o_proj"),
        )
        self._norm = None
        if qk_norm_eps is not None:
            self._norm = QKNorm(heads.head_dim, qk_norm_eps, context)

    def __call__(
        self,
        x: Activations,
        rope: RopeInputs,
        backend: AttentionBackend,
        logits_indices: torch.Tensor | None = None,
    ) -> LayerOutput:
        return self._attend(self._qkv_proj(x), rope, backend, logits_indices)

    def apply_after_norm(
        self,
        norm: QuantizingRMSNorm,
        x: LayerOutput,
        residual: torch.Tensor,
        rope: RopeInputs,
        backend: AttentionBackend,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[LayerOutput, torch.Tensor]:
        """Return (the attention of norm(x + residual), x + residual), the latter of all T tokens."""
        qkv, total = self._qkv_proj.apply_after_norm(norm, x, residual)
        return self._attend(qkv, rope, backend, logits_indices), total

    def _attend(
        self,
        product: LinearOutput,
        rope: RopeInputs,
        backend: AttentionBackend,
        logits_indices: torch.Tensor | None,
    ) -> LayerOutput:
        qkv, expand = split_deferred(product)
        norm_weights, norm_eps = (None, 0.0) if self._norm is None else (self._norm.weights, self._norm.eps)
        # Of the last layer's tokens that have no logits, only K and V are needed.
        if logits_indices is not None and len(logits_indices) == 0:
            backend.store_qkv(self._layer, qkv, rope, norm_weights, norm_eps, expand)
            return qkv.new_empty((0, self._hidden_size))
        attended = backend.forward_qkv(self._layer, qkv, rope, norm_weights, norm_eps, expand).flatten(1)
        if logits_indices is not None:
            attended = attended.index_select(0, logits_indices)
        return self._o_proj(attended)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this block."""
        yield from self._qkv_proj.weight_shards(prefix)
        yield from self._o_proj.weight_shards(prefix)
        if self._norm is not None:
            yield from self._norm.weight_shards(prefix)

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the LoRA matrices of the projections, with the prefix of their modules' names."""
        yield from self._qkv_proj.lora_layers(prefix)
        yield from self._o_proj.lora_layers(prefix)
