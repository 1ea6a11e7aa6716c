"""Memory footprint of a model, by part, computed from its configuration alone; imports no torch.

The engine sizes its KV cache by ``estimate_working_bytes``, and ``skiff info`` reports all parts before anything is
loaded.
"""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.attention.workspace import GATHER_WORKSPACE_BYTES
from skiff_runtime.config import AUTO, Config, QuantizationOption
from skiff_runtime.kernels.constants import DEQUANTIZED_BYTES
from skiff_runtime.layers.projections import PACKED_MODULES, Projection
from skiff_runtime.layers.weight_format import Fp8Format, Int4Format, choose_weight_format
from skiff_runtime.models.config import ModelConfig

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLER_BYTES_PER_LOGIT: Final = 48
"""Float32 copies, log-probabilities, and values with int64 indices and float64 sums where rows are sorted."""
PROMPT_LOGPROBS_CHUNK: Final = 64
"""Positions of a prompt whose logits are in memory at a time."""
PROMPT_LOGPROBS_BYTES_PER_LOGIT: Final = 16
"""Float32 copies, and the search for the most likely tokens."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of weights, of the whole model or of one rank's shard."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    """0 where the embedding is also the output head."""

    @property
    def total(self) -> int:
        """Sum over all parts."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def count_parameters(model: ModelConfig, tp_size: int = 1) -> ParameterCounts:
    """Count the weights of rank 0 of ``tp_size``; no rank has more.

    With fewer KV heads than ranks, heads are replicated; norms and the biases after a sum are whole on every rank.
    """
    hidden, layers = model.hidden_size, model.num_layers
    vocabulary = -(-model.vocab_size // tp_size)
    shapes = _matrix_shapes(model, tp_size)
    elements = {projection: rows * columns for projection, (rows, columns) in shapes.items()}
    outputs = {projection: rows for projection, (rows, _) in shapes.items()}
    qkv_bias, output_bias = _attention_biases(model)
    attention_biases = qkv_bias * outputs["qkv_proj"] + output_bias * outputs["o_proj"]
    mlp_biases = outputs["gate_up_proj"] + outputs["down_proj"] if model.mlp_bias else 0
    head_norms = 2 * model.head_dim if model.architecture == "Qwen3ForCausalLM" else 0
    return ParameterCounts(
        embedding=vocabulary * hidden,
        attention=layers * (elements["qkv_proj"] + elements["o_proj"] + attention_biases),
        mlp=layers * (elements["gate_up_proj"] + elements["down_proj"] + mlp_biases),
        norms=layers * (2 * hidden + head_norms) + hidden,
        head=0 if model.tie_word_embeddings else vocabulary * hidden,
    )


def estimate_weight_bytes(
    model: ModelConfig, tp_size: int, *, element_bytes: int, quantization: QuantizationOption
) -> int:
    """Compute the bytes of one rank's weights.

    A matrix of attention or MLP takes what its format needs, unless a quantized checkpoint keeps it unquantized.
    """
    counts = count_parameters(model, tp_size)
    weight_format = choose_weight_format(quantization, model.weight_format)
    if weight_format is None:
        return counts.total * element_bytes
    quantized = quantized_bytes = 0
    for projection, (rows, columns) in _matrix_shapes(model, tp_size).items():
        layers = sum((layer, projection) not in model.unquantized for layer in range(model.num_layers))
        parts = len(PACKED_MODULES[projection])
        quantized += layers * rows * columns
        quantized_bytes += layers * weight_format.matrix_bytes(rows, columns, parts, element_bytes)
    return quantized_bytes + (counts.total - quantized) * element_bytes


def _matrix_shapes(model: ModelConfig, tp_size: int) -> dict[Projection, tuple[int, int]]:
    """Return (outputs, inputs) of one rank's matrices in each layer."""
    inner, hidden = model.intermediate_size // tp_size, model.hidden_size
    query = model.num_heads * model.head_dim // tp_size
    outputs = query + 2 * local_kv_heads(model, tp_size) * model.head_dim
    return {
        "qkv_proj": (outputs, hidden),
        "o_proj": (hidden, query),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }


def _largest_matrix(model: ModelConfig, tp_size: int) -> int:
    """Return the number of elements of a layer's largest matrix."""
    return max(rows * columns for rows, columns in _matrix_shapes(model, tp_size).values())


def local_kv_heads(model: ModelConfig, tp_size: int) -> int:
    """Return the number of KV heads of one rank; with fewer heads than ranks, each rank holds a copy of one."""
    return max(1, model.num_kv_heads // tp_size)


def kv_bytes_per_token(model: ModelConfig, tp_size: int, element_bytes: int) -> int:
    """Compute the bytes that one token takes in a rank's KV cache: K and V of every layer."""
    return 2 * model.num_layers * local_kv_heads(model, tp_size) * model.head_dim * element_bytes


def kv_bytes_read(model: ModelConfig, tp_size: int, element_bytes: int, context: int) -> int:
    """Compute the bytes of a rank's KV cache that a decode step reads for one row after ``context`` tokens.

    A layer with a sliding window reads no more than that; the cache holds all tokens nevertheless.
    """
    layer_bytes = kv_bytes_per_token(model, tp_size, element_bytes) // model.num_layers
    return layer_bytes * sum(min(context, window or context) for window in model.sliding_windows)


def estimate_working_bytes(config: Config, model: ModelConfig, *, tp_size: int, element_bytes: int) -> int:
    """Estimate, from above, the bytes of a rank's steps and tables besides weights and KV cache.

    Counted are the activations of a full step (in float32 where norms and attention compute so), the logits with the
    sampler's copies, gathered K and V (in the cache's dtype and in one of ``element_bytes``), and the tables of tokens
    and pages; on a CPU also the float32 copies of its attention and of FP8 matrices; and the part of a 4-bit matrix that
    is dequantized at a time. On a GPU this is measured instead (``engine.memory_profile``).
    """
    width = (
        6 * model.hidden_size
        + (4 * model.intermediate_size + 6 * model.num_heads * model.head_dim) // tp_size
    )
    activations = config.max_num_batched_tokens * width * 4
    context = config.max_model_len or model.max_position_embeddings
    cached_bytes = 0 if config.kv_cache_dtype == AUTO else 1
    chunk = config.max_num_batched_tokens
    read = max(min(context, (window or context) + chunk) for window in model.sliding_windows)
    gathered = 2 * read * local_kv_heads(model, tp_size) * model.head_dim * (element_bytes + cached_bytes)
    dequantized = 0
    weight_format = choose_weight_format(config.quantization, model.weight_format)
    if isinstance(weight_format, Int4Format):
        dequantized = DEQUANTIZED_BYTES
    if config.device == "cpu":
        gathered = max(gathered, 2 * GATHER_WORKSPACE_BYTES)
        if isinstance(weight_format, Fp8Format):
            dequantized = 4 * _largest_matrix(model, tp_size)
        dequantized *= (
            5 if isinstance(weight_format, Int4Format) else 1
        )  # the steps of dequantization, in float32
    tables = 4 * config.max_running_requests * (context + 1 + context // config.page_size + 1)
    return activations + estimate_sampling_bytes(config, model) + gathered + dequantized + tables


def estimate_sampling_bytes(config: Config, model: ModelConfig) -> int:
    """Estimate, from above, the bytes that sampling takes, whichever parameters the requests set."""
    return model.vocab_size * max(
        config.max_running_requests * SAMPLER_BYTES_PER_LOGIT,
        min(config.max_num_batched_tokens, PROMPT_LOGPROBS_CHUNK) * PROMPT_LOGPROBS_BYTES_PER_LOGIT,
    )


def _attention_biases(model: ModelConfig) -> tuple[bool, bool]:
    """Return whether the projections of query, key and value have biases, and whether the output projection has one."""
    if model.architecture == "Qwen2ForCausalLM":
        return True, False
    if model.architecture == "MistralForCausalLM":
        return False, False
    return model.attention_bias, model.attention_bias
