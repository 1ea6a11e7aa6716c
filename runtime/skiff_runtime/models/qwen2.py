"""Qwen2 and Qwen2.5: query, key and value projections have biases."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """Weights are named as in the Hugging Face class of the same name."""

    def attention(self, layer: int) -> Attention:
        """The family's attention block."""
        return Attention(
            layer,
            self.config.hidden_size,
            self.heads,
            self.placement,
            qkv_bias=True,
        )
