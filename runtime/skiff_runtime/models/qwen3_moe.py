"""Qwen3 as a mixture of experts (30B-A3B, 235B-A22B): Qwen3's attention, and sparse blocks in some or all layers."""

from skiff_runtime.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """The architecture of the Hugging Face class of this name, whose names its weights keep."""
