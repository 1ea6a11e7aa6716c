"""Qwen3 (dense): queries and keys are normalized per head before they are rotated."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """Weights are named as in the Hugging Face class of the same name."""

    def attention(self, layer: int) -> Attention:
        """The family's attention block."""
        return Attention(
            layer,
            self.config.hidden_size,
            self.heads,
            self.placement,
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            qk_norm_eps=self.config.rms_norm_eps,
        )
