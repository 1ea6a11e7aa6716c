"""Where the host, not the GPU, says how long a step takes."""

from typing import Final

from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import count_parameters

LAUNCH_SECONDS: Final = 75e-6
"""What the host takes for a layer of a step with prompts, most of it to launch FlashInfer's prefill."""
READ_BYTES: Final = 4e12
"""A second, of an H200's memory."""
OPERATIONS: Final = 6e14
"""A second, of an H200's tensor cores with weights of two bytes, and twice as many with one byte."""
MOST_TOKENS: Final = 1024
"""Beyond these our own kernel for prefill loses more time on the GPU than the host gains."""


def launch_bound_tokens(model: ModelConfig, ranks: int, weight_bytes: int) -> int:
    """Tokens of a step with prompts for which the products of a layer take the GPU less than a launch takes the host.

    0 where the weights of a layer, of so many bytes each, are not even read in that time.
    """
    found = count_parameters(model, ranks)
    weights = (found.attention + found.mlp) / model.num_layers
    if weight_bytes * weights / READ_BYTES > LAUNCH_SECONDS:
        return 0
    return min(MOST_TOKENS, int(LAUNCH_SECONDS * OPERATIONS / (weight_bytes * weights)))
