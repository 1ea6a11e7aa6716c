"""The decoder that all supported families share: embedding, decoder layers, final norm, output head."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.layers.attention import Attention, AttentionHeads
from skiff_runtime.layers.embedding import OutputHead, VocabParallelEmbedding
from skiff_runtime.layers.lora import LoraLayer
from skiff_runtime.layers.mlp import MLP, GatedMLP
from skiff_runtime.layers.moe import SparseMoeBlock
from skiff_runtime.layers.norm import QuantizingRMSNorm, RMSNorm
from skiff_runtime.layers.partial_sum import LayerOutput, reduce_output
from skiff_runtime.layers.rotary import RotaryEmbedding
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.models.config import ModelConfig


class DecoderLayer:
    """Attention and MLP, each after a norm and around a residual stream."""

    def __init__(
        self, layer: int, config: ModelConfig, attention: Attention, mlp: MLP, context: LayerContext
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._attention = attention
        self._mlp = mlp
        self._input_norm = QuantizingRMSNorm(size, eps, context.for_projection(layer, "qkv_proj"))
        self._post_attention_norm = QuantizingRMSNorm(size, eps, mlp.input_context)

    def __call__(
        self,
        x: LayerOutput,
        residual: torch.Tensor | None,
        rope: RopeInputs,
        backend: AttentionBackend,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[LayerOutput, torch.Tensor]:
        """Return (output, residual) [T, hidden]; their sum, computed by the next norm, is the layer's result.

        With ``logits_indices`` int[S] both are [S, hidden]: of the other tokens, only K and V are needed.
        """
        if residual is None:
            residual = reduce_output(x)
            x = self._attention(self._input_norm(residual), rope, backend, logits_indices)
        else:
            x, residual = self._attention.apply_after_norm(
                self._input_norm, x, residual, rope, backend, logits_indices
            )
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        if len(x) == 0:  # not every device computes matrix products and collectives of zero rows
            return x, residual
        return self._mlp.apply_after_norm(self._post_attention_norm, x, residual)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this layer."""
        yield from self._attention.weight_shards(f"{prefix}self_attn.")
        yield from self._mlp.weight_shards(f"{prefix}{self._mlp.name}.")
        yield from self._input_norm.weight_shards(f"{prefix}input_layernorm")
        yield from self._post_attention_norm.weight_shards(f"{prefix}post_attention_layernorm")

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the LoRA matrices of the linear layers, with the prefix of their modules' names."""
        yield from self._attention.lora_layers(f"{prefix}self_attn.")
        yield from self._mlp.lora_layers(f"{prefix}{self._mlp.name}.")


class DecoderModel(ABC):
    """One rank's shard of a causal language model; ``max_positions`` bounds the table of rotary embeddings."""

    def __init__(self, config: ModelConfig, context: LayerContext, *, max_positions: int) -> None:
        self.config = config
        self.context = context
        self.heads = AttentionHeads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self._layers = [
            DecoderLayer(layer, config, self.attention(layer), self.mlp(layer), context)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self._head_weight = self._embedding
        if not config.tie_word_embeddings:
            self._head_weight = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self._head = OutputHead(self._head_weight)
        self.vocab_shard = self._head.shard
        self._rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.rope_scaling, length=max_positions, context=context
        )

    @abstractmethod
    def attention(self, layer: int) -> Attention:
        """Build the family's attention block."""

    def mlp(self, layer: int) -> MLP:
        """Build the layer's MLP: a sparse block where the model is a mixture of experts, else a dense one."""
        config, context = self.config, self.context
        if config.moe is not None and layer not in config.moe.dense_layers:
            return SparseMoeBlock(layer, config.hidden_size, config.moe, context)
        return GatedMLP(
            layer, config.hidden_size, config.intermediate_size, bias=config.mlp_bias, context=context
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        backend: AttentionBackend,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, positions and KV offsets int[T] -> (output, residual) [T, hidden].

        With ``logits_indices`` int[S] the last layer drops all other tokens after its attention, and both results are
        [S, hidden]. The layers before it need every token, because the last one attends to their results.
        """
        rope = self._rotary.for_step(positions, slot_mapping)
        x: LayerOutput = self._embedding(token_ids)
        residual: torch.Tensor | None = None
        *before, last = self._layers
        for layer in before:
            x, residual = layer(x, residual, rope, backend)
        x, residual = last(x, residual, rope, backend, logits_indices)
        return reduce_output(x), residual

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Allocate a buffer for the ``logits`` of ``rows`` tokens."""
        return self._head.empty_logits(rows)

    def logits(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute logits [S, vocab_shard.size] from the results of ``forward``, in the model's dtype; in ``out`` if given."""
        return self._head(self.normalize(x, residual), out)

    def normalize(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the results of ``forward`` behind the final norm, [S, hidden]; equal on every rank."""
        return self._norm.add_and_normalize(x, residual)[0]

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this rank's model."""
        yield from self._embedding.weight_shards("model.embed_tokens.weight")
        for number, layer in enumerate(self._layers):
            yield from layer.weight_shards(f"model.layers.{number}.")
        yield from self._norm.weight_shards("model.norm")
        if self._head_weight is not self._embedding:
            yield from self._head_weight.weight_shards("lm_head.weight")

    def lora_layers(self) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the LoRA matrices of all linear layers, with the prefix of their modules' names; none without LoRA."""
        for number, layer in enumerate(self._layers):
            yield from layer.lora_layers(f"model.layers.{number}.")

    def weight_bytes(self) -> int:
        """Return the bytes of all weights of this rank's model, LoRA slots included; it may be on the meta device."""
        slots = sum(layer.nbytes for _, layer in self.lora_layers())
        return slots + sum(shard.nbytes for shard in self.weight_shards())
