"""Memory footprint of a model, by part, computed from its configuration alone; imports no torch.

The engine sizes its KV cache by ``estimate_working_bytes``, and ``skiff info`` reports all parts before anything is
loaded.
"""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.attention.workspace import GATHER_WORKSPACE_BYTES
from skiff_runtime.config import AUTO, Config, QuantizationOption
from skiff_runtime.kernels.constants import DEQUANTIZED_BYTES, vocab_shard_size
from skiff_runtime.layers.projections import Projection
from skiff_runtime.layers.weight_format import Fp8Format, Int4Format, WeightFormat, choose_weight_format
from skiff_runtime.models.config import ModelConfig

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLER_BYTES_PER_LOGIT: Final = 48
"""Float32 copies, log-probabilities, and values with int64 indices and float64 sums where rows are sorted."""
PROMPT_LOGPROBS_CHUNK: Final = 64
"""Positions of a prompt whose logits are in memory at a time."""
PROMPT_LOGPROBS_BYTES_PER_LOGIT: Final = 16
"""Float32 copies, and the search for the most likely tokens."""
INT4_STEPS: Final = 5
"""Float32 matrices in memory while a CPU dequantizes: integers, zero points, difference, scales and product."""
_QK_NORM: Final = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that normalize each head of queries and keys."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of weights, of the whole model or of one rank's shard."""

    embedding: int
    attention: int
    mlp: int
    """Those of dense layers."""
    routers: int
    experts: int
    norms: int
    head: int
    """0 where the embedding is also the output head."""

    @property
    def total(self) -> int:
        """Sum over all parts."""
        dense = self.embedding + self.attention + self.mlp + self.norms + self.head
        return dense + self.routers + self.experts


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A matrix that packs ``parts`` modules, or ``experts`` of this size."""

    outputs: int
    inputs: int
    parts: int
    experts: int | None = None

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * (1 if self.experts is None else self.experts)

    def nbytes(self, element_bytes: int, weight_format: WeightFormat | None) -> int:
        """Compute the bytes; without a format, of weights in the model's dtype."""
        if weight_format is None:
            return self.elements * element_bytes
        if self.experts is None:
            return weight_format.matrix_bytes(self.outputs, self.inputs, self.parts, element_bytes)
        assert isinstance(weight_format, Fp8Format), "experts have no other format"
        return self.experts * weight_format.expert_bytes(self.outputs, self.inputs)


_MatricesByProjection = dict[Projection, _Matrices]


def count_parameters(
    model: ModelConfig, tp_size: int = 1, *, expert_parallel: bool = False
) -> ParameterCounts:
    """Count the weights of rank 0 of ``tp_size``; no rank has more.

    With fewer KV heads than ranks, heads are replicated; norms, routers and the biases after a sum are whole on every
    rank. With expert parallelism a rank has whole experts, otherwise some columns of each.
    """
    hidden, layers = model.hidden_size, model.num_layers
    vocabulary = vocab_shard_size(model.vocab_size, tp_size)
    sparse, moe = num_sparse_layers(model), model.moe
    attention = _attention_matrices(model, tp_size)
    mlp = _mlp_matrices(model, tp_size)
    experts = _expert_matrices(model, tp_size, expert_parallel=expert_parallel)
    qkv_bias, output_bias = _attention_biases(model)
    attention_biases = qkv_bias * attention["qkv_proj"].outputs + output_bias * attention["o_proj"].outputs
    mlp_biases = sum(each.outputs for each in mlp.values()) if model.mlp_bias else 0
    head_norms = 2 * model.head_dim if model.architecture in _QK_NORM else 0
    return ParameterCounts(
        embedding=vocabulary * hidden,
        attention=layers * (_count_elements(attention) + attention_biases),
        mlp=(layers - sparse) * (_count_elements(mlp) + mlp_biases),
        routers=0 if moe is None else sparse * moe.num_experts * hidden,
        experts=sparse * _count_elements(experts),
        norms=layers * (2 * hidden + head_norms) + hidden,
        head=0 if model.tie_word_embeddings else vocabulary * hidden,
    )


def count_active_parameters(model: ModelConfig) -> int:
    """Count the weights of the whole model that one token takes: all but those of the experts that it does not."""
    counts = count_parameters(model)
    if model.moe is None:
        return counts.total
    return counts.total - counts.experts + counts.experts * model.moe.top_k // model.moe.num_experts


def num_sparse_layers(model: ModelConfig) -> int:
    """Return the number of layers with a mixture of experts."""
    return 0 if model.moe is None else model.num_layers - len(model.moe.dense_layers)


def estimate_weight_bytes(
    model: ModelConfig,
    tp_size: int,
    *,
    element_bytes: int,
    quantization: QuantizationOption,
    expert_parallel: bool = False,
) -> int:
    """Compute the bytes of one rank's weights.

    A matrix of attention, MLP or an expert takes what its format needs, unless a quantized checkpoint keeps it
    unquantized.
    """
    size = count_parameters(model, tp_size, expert_parallel=expert_parallel).total * element_bytes
    weight_format = choose_weight_format(quantization, model.weight_format)
    if weight_format is None:
        return size
    for layer in range(model.num_layers):
        matrices = _attention_matrices(model, tp_size) | (
            _expert_matrices(model, tp_size, expert_parallel=expert_parallel)
            if _is_sparse(model, layer)
            else _mlp_matrices(model, tp_size)
        )
        size += _nbytes(model, layer, matrices, element_bytes, weight_format)
        size -= _nbytes(model, layer, matrices, element_bytes, None)
    return size


def estimate_expert_bytes(
    model: ModelConfig,
    tp_size: int,
    *,
    element_bytes: int,
    quantization: QuantizationOption,
    expert_parallel: bool = False,
) -> int:
    """Compute the bytes of one rank's experts, a part of ``estimate_weight_bytes``."""
    matrices = _expert_matrices(model, tp_size, expert_parallel=expert_parallel)
    sparse = [layer for layer in range(model.num_layers) if _is_sparse(model, layer)]
    weight_format = choose_weight_format(quantization, model.weight_format)
    return sum(_nbytes(model, layer, matrices, element_bytes, weight_format) for layer in sparse)


def _nbytes(
    model: ModelConfig,
    layer: int,
    matrices: _MatricesByProjection,
    element_bytes: int,
    weight_format: WeightFormat | None,
) -> int:
    """Compute the bytes of a layer's matrices, of which a checkpoint may keep some unquantized."""
    return sum(
        each.nbytes(element_bytes, None if (layer, projection) in model.unquantized else weight_format)
        for projection, each in matrices.items()
    )


def _is_sparse(model: ModelConfig, layer: int) -> bool:
    return model.moe is not None and layer not in model.moe.dense_layers


def _attention_matrices(model: ModelConfig, tp_size: int) -> _MatricesByProjection:
    """Return one rank's matrices in each layer's attention."""
    query = model.num_heads * model.head_dim // tp_size
    outputs = query + 2 * local_kv_heads(model, tp_size) * model.head_dim
    return {
        "qkv_proj": _Matrices(outputs, model.hidden_size, parts=3),
        "o_proj": _Matrices(model.hidden_size, query, parts=1),
    }


def _mlp_matrices(model: ModelConfig, tp_size: int) -> _MatricesByProjection:
    """Return one rank's matrices in each dense MLP."""
    inner, hidden = model.intermediate_size // tp_size, model.hidden_size
    return {
        "gate_up_proj": _Matrices(2 * inner, hidden, parts=2),
        "down_proj": _Matrices(hidden, inner, parts=1),
    }


def _expert_matrices(model: ModelConfig, tp_size: int, *, expert_parallel: bool) -> _MatricesByProjection:
    """Return the matrices of one rank's experts in each sparse layer; none for a dense model."""
    moe, hidden = model.moe, model.hidden_size
    if moe is None:
        return {}
    inner, count = moe.intermediate_size // tp_size, moe.num_experts
    if expert_parallel:
        inner, count = moe.intermediate_size, moe.num_experts // tp_size
    return {
        "gate_up_proj": _Matrices(2 * inner, hidden, parts=2, experts=count),
        "down_proj": _Matrices(hidden, inner, parts=1, experts=count),
    }


def _count_elements(matrices: _MatricesByProjection) -> int:
    return sum(each.elements for each in matrices.values())


def _largest_matrix(model: ModelConfig, tp_size: int, *, expert_parallel: bool) -> int:
    """Return the number of elements of a layer's largest matrix; those of experts are used one at a time."""
    matrices = [*_attention_matrices(model, tp_size).values()]
    if num_sparse_layers(model) < model.num_layers:
        matrices += _mlp_matrices(model, tp_size).values()
    matrices += _expert_matrices(model, tp_size, expert_parallel=expert_parallel).values()
    return max(each.outputs * each.inputs for each in matrices)


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
        + _expert_width(config, model, tp_size)
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
            dequantized = 4 * _largest_matrix(model, tp_size, expert_parallel=config.expert_parallel)
        if isinstance(weight_format, Int4Format):  # the steps of dequantization, in float32
            dequantized *= INT4_STEPS * 4 // element_bytes
    tables = 4 * config.max_running_requests * (context + 1 + context // config.page_size + 1)
    return activations + estimate_sampling_bytes(config, model) + gathered + dequantized + tables


def _expert_width(config: Config, model: ModelConfig, tp_size: int) -> int:
    """Return the numbers that a token takes in a sparse layer: for each of its experts, gate, up, and the results of both products."""
    if model.moe is None:
        return 0
    inner = model.moe.intermediate_size // (1 if config.expert_parallel else tp_size)
    return model.moe.top_k * (4 * inner + model.hidden_size) + 2 * model.moe.num_experts


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
    if model.architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return False, False
    return model.attention_bias, model.attention_bias
