"""Launch-bound steps: those for which the host takes longer to launch a layer's kernels than the GPU to run them."""

from typing import Final

from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import count_parameters

LAUNCH_SECONDS: Final = 75e-6
"""Host time per layer of a step with prefill rows, most of it for the launch of FlashInfer's prefill."""
READ_BYTES: Final = 4e12
"""Bytes per second of an H200's memory."""
OPERATIONS: Final = 6e14
"""Operations per second of an H200's tensor cores with 2-byte weights; with 1-byte weights it is twice that."""
MAX_TOKENS: Final = 1024
"""With more tokens, our own prefill kernel loses more time on the GPU than the host gains."""


def launch_bound_tokens(model: ModelConfig, tp_size: int, element_bytes: int) -> int:
    """Return the largest number of tokens for which a prefill step is launch-bound.

    Up to this number, the matrix products of a layer take the GPU less time than their launch takes the host. 0 if
    reading the weights of a layer, of ``element_bytes`` each, already takes longer.
    """
    counts = count_parameters(model, tp_size)
    weights = (counts.attention + counts.mlp) / model.num_layers
    if element_bytes * weights / READ_BYTES > LAUNCH_SECONDS:
        return 0
    return min(MAX_TOKENS, int(LAUNCH_SECONDS * OPERATIONS / (element_bytes * weights)))
