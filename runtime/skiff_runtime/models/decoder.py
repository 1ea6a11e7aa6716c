"""What all served families share: embedding, decoder layers, final norm, output head."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.layers.attention import Attention, Heads
from skiff_runtime.layers.embedding import OutputHead, VocabParallelEmbedding
from skiff_runtime.layers.mlp import GatedMLP
from skiff_runtime.layers.norm import QuantizingRMSNorm, RMSNorm
from skiff_runtime.layers.rotary import RopeInputs, RotaryEmbedding
from skiff_runtime.layers.sharding import LayerContext, Piece
from skiff_runtime.models.config import ModelConfig


class DecoderLayer:
    """Attention and MLP, each after a norm and around a residual stream."""

    def __init__(
        self, layer: int, config: ModelConfig, attention: Attention, placement: LayerContext
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._attention = attention
        self._mlp = GatedMLP(layer, size, config.intermediate_size, bias=config.mlp_bias, placement=placement)
        self._input_norm = QuantizingRMSNorm(size, eps, placement.of(layer, "qkv"))
        self._middle_norm = QuantizingRMSNorm(size, eps, placement.of(layer, "gate_up"))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: RopeInputs,
        backend: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual) [T, hidden]; their sum is the layer's result, formed by the next norm.

        With ``wanted`` int[S] both are [S, hidden]: of the other tokens, nothing but K and V is needed.
        """
        if residual is None:
            normed, residual = self._input_norm(x), x
        else:
            normed, residual = self._input_norm.add_and_normalize(x, residual)
        x = self._attention(normed, rotation, backend, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if len(x) == 0:  # products and collectives of no rows are not for every device
            return x, residual
        normed, residual = self._middle_norm.add_and_normalize(x, residual)
        return self._mlp(normed), residual

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this layer."""
        yield from self._attention.pieces(f"{prefix}self_attn.")
        yield from self._mlp.pieces(f"{prefix}mlp.")
        yield from self._input_norm.pieces(f"{prefix}input_layernorm")
        yield from self._middle_norm.pieces(f"{prefix}post_attention_layernorm")


class DecoderModel(ABC):
    """One rank's share of a causal language model; ``max_positions`` bounds the rotary table."""

    def __init__(self, config: ModelConfig, placement: LayerContext, *, max_positions: int) -> None:
        self.config = config
        self.placement = placement
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, placement)
        self._layers = [
            DecoderLayer(layer, config, self.attention(layer), placement)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self._head_weight = self._embedding
        if not config.tie_word_embeddings:
            self._head_weight = VocabParallelEmbedding(config.vocab_size, config.hidden_size, placement)
        self._head = OutputHead(self._head_weight, config.vocab_size, placement)
        self._rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.rope_scaling, length=max_positions, placement=placement
        )

    @abstractmethod
    def attention(self, layer: int) -> Attention:
        """The family's attention block."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        backend: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, positions and places of K and V in the cache, int[T] -> (output, residual) [T, hidden].

        With ``wanted`` int[S] the last layer goes on behind its attention with the tokens at these places alone, and
        both are [S, hidden].
        """
        rotation = self._rotary.at(positions, slot_mapping)
        x, residual = self._embedding(token_ids), None
        *before, last = self._layers
        for layer in before:
            x, residual = layer(x, residual, rotation, backend)
        return last(x, residual, rotation, backend, wanted)

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Where ``logits`` of so many tokens can be put."""
        return self._head.room(rows)

    def logits(
        self, x: torch.Tensor, residual: torch.Tensor, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What ``forward`` returned, for S chosen tokens -> logits [S, vocab_size] in the model's type, in ``room`` if given."""
        return self._head(self._norm.add_and_normalize(x, residual)[0], room)

    def pieces(self) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this rank's model."""
        yield from self._embedding.pieces("model.embed_tokens.weight")
        for number, layer in enumerate(self._layers):
            yield from layer.pieces(f"model.layers.{number}.")
        yield from self._norm.pieces("model.norm")
        if self._head_weight is not self._embedding:
            yield from self._head_weight.pieces("lm_head.weight")
