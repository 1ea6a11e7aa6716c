"""Launch-bound steps: those for which the host takes longer to launch a layer's kernels than the GPU to run them."""

from skiff_runtime.kernels.tuning import PrefillChoiceTuning
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import count_parameters


def launch_bound_tokens(
    model: ModelConfig, tp_size: int, element_bytes: int, tuning: PrefillChoiceTuning
) -> int:
    """Return the largest number of tokens for which a prefill step is launch-bound.

    Up to this number, the matrix products of a layer take the GPU less time than their launch takes the host. 0 if
    reading the weights of a layer, of ``element_bytes`` each, already takes longer.
    """
    counts = count_parameters(model, tp_size)
    weights = (counts.attention + counts.mlp) / model.num_layers
    if element_bytes * weights / tuning.bytes_per_second > tuning.launch_seconds:
        return 0
    # A token takes 2 * weights operations. One-byte weights have twice the rate, so the 2 becomes ``element_bytes``.
    tokens = int(tuning.launch_seconds * tuning.flops_per_second / (element_bytes * weights))
    return min(tuning.max_tokens, tokens)
