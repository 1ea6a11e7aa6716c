"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from skiff_runtime.models.mistral import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """The architecture of the Hugging Face class of this name, whose names its weights keep."""
