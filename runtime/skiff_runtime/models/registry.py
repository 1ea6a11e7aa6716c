"""Model classes by the architecture name in ``config.json``."""

from typing import Final

from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.llama import LlamaForCausalLM
from skiff_runtime.models.mistral import MistralForCausalLM
from skiff_runtime.models.mixtral import MixtralForCausalLM
from skiff_runtime.models.qwen2 import Qwen2ForCausalLM
from skiff_runtime.models.qwen3 import Qwen3ForCausalLM
from skiff_runtime.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: Final[dict[str, type[DecoderModel]]] = {
    each.__name__: each
    for each in (
        LlamaForCausalLM,
        MistralForCausalLM,
        MixtralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )
}


def make_model(config: ModelConfig, context: LayerContext, *, max_positions: int) -> DecoderModel:
    """Build the rank's model; its weights are allocated but not loaded."""
    return MODELS[config.architecture](config, context, max_positions=max_positions)
