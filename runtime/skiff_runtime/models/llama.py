"""Llama 2, 3, 3.1 to 3.3: biases as the configuration says."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
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
        )
