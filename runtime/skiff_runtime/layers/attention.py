"""The self-attention block of a decoder layer: projections around an attention backend."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.qk_norm_rope import qk_norm_rope_store_kv
from skiff_runtime.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    shard_evenly,
    shard_or_replicate,
)
from skiff_runtime.layers.norm import QKNorm
from skiff_runtime.layers.rotary import RopeInputs
from skiff_runtime.layers.sharding import LayerContext, Piece


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the whole model, and what one rank computes of them."""

    query: int
    kv: int
    size: int

    def local_query_heads(self, ranks: int) -> int:
        """Query heads of one rank."""
        return self.query // ranks

    def local_kv(self, ranks: int) -> int:
        """KV heads of one rank; with fewer heads than ranks, each rank holds a copy of one."""
        return max(1, self.kv // ranks)


class Attention:
    """[T, hidden] -> [T, hidden], with rotary positions; writes the tokens' K and V through the backend.

    With ``wanted`` int[S] the result is [S, hidden], of the tokens at these places.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: Heads,
        placement: LayerContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        self._layer, self._hidden_size = layer, hidden_size
        cuts = [
            shard_evenly("q_proj", heads.query * heads.size, placement),
            shard_or_replicate("k_proj", heads.kv, heads.size, placement),
            shard_or_replicate("v_proj", heads.kv, heads.size, placement),
        ]
        self._qkv = ColumnParallelLinear(
            hidden_size, cuts, bias=qkv_bias, placement=placement.of(layer, "qkv")
        )
        self._output = RowParallelLinear(
            "o_proj",
            heads.query * heads.size,
            hidden_size,
            bias=output_bias,
            placement=placement.of(layer, "output"),
        )
        self._norm = None
        if qk_norm_eps is not None:
            self._norm = QKNorm(heads.size, qk_norm_eps, placement)

    def __call__(
        self,
        x: Activations,
        rotation: RopeInputs,
        backend: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        norm = self._norm
        q = qk_norm_rope_store_kv(
            self._qkv(x),
            rotation.table,
            rotation.positions,
            None if norm is None else norm.weights,
            0.0 if norm is None else norm.eps,
            backend.pool.tokens(self._layer),
            rotation.slot_mapping,
        )
        if wanted is None:
            return self._output(backend.forward(self._layer, q).flatten(1))
        if len(wanted) == 0:
            return q.new_empty((0, self._hidden_size))
        return self._output(backend.forward(self._layer, q).flatten(1).index_select(0, wanted))

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this block."""
        yield from self._qkv.pieces(prefix)
        yield from self._output.pieces(prefix)
        if self._norm is not None:
            yield from self._norm.pieces(prefix)
