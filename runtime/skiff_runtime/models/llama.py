"""Llama 2, 3, and 3.1 to 3.3: the configuration decides about biases."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
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
        )
