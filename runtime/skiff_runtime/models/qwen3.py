"""Qwen3 (dense): queries and keys are normalized per head before they are rotated."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The architecture of the Hugging Face class of this name, whose names its weights keep."""

    def attention(self, layer: int) -> Attention:
        """Build the attention block."""
        return Attention(
            layer,
            self.config.hidden_size,
            self.heads,
            self.context,
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            qk_norm_eps=self.config.rms_norm_eps,
        )
