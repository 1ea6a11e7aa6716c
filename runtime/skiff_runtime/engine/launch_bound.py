"""Launch-bound steps: those for which the host takes longer to launch a layer's kernels than the GPU to run them."""

from bisect import bisect_right

from skiff_runtime.kernels.tuning import PrefillChoiceTuning
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import count_parameters


def launch_bound_tokens(
    model: ModelConfig, tp_size: int, element_bytes: int, tuning: PrefillChoiceTuning
) -> int:
    """Return the largest number of tokens for which a prefill step is launch-bound.

    Up to this number, the matrix products of a layer take the GPU less time than their launch takes the host. 0 if
    reading the weights of a layer, of ``element_bytes`` each, already takes longer. Of experts, those are read that the
    tokens are expected to choose (``MoeConfig.expected_experts``).
    """
    counts, moe = count_parameters(model, tp_size), model.moe
    dense = (counts.attention + counts.mlp + counts.routers) / model.num_layers
    expert = 0.0 if moe is None else counts.experts / model.num_layers / moe.num_experts

    def gpu_seconds(tokens: int) -> float:
        read = dense + (0.0 if moe is None else expert * moe.expected_experts(tokens))
        used = dense + (0.0 if moe is None else expert * moe.top_k)
        # A token takes 2 * weights operations. One-byte weights have twice the rate: the 2 becomes ``element_bytes``.
        return element_bytes * max(read / tuning.bytes_per_second, tokens * used / tuning.flops_per_second)

    return bisect_right(range(1, tuning.max_tokens + 1), tuning.launch_seconds, key=gpu_seconds)
