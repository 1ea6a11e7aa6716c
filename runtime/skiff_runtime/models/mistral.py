"""Mistral: Llama without biases, with a sliding window in all layers of its first version."""

from skiff_runtime.layers.attention import Attention
from skiff_runtime.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """The architecture of the Hugging Face class of this name, whose names its weights keep."""

    def attention(self, layer: int) -> Attention:
        """Build the attention block."""
        return Attention(
            layer,
            self.config.hidden_size,
            self.heads,
            self.context,
        )
