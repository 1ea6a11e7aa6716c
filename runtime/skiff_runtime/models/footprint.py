"""How much memory a model takes, by part, reckoned from its configuration alone; no torch.

The engine sizes its KV cache by ``estimate_working_bytes``, and ``skiff info`` tells all of it
before anything is loaded.
"""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.config import AUTO, Config, Quantization
from skiff_runtime.layers.projections import Product
from skiff_runtime.models.config import ModelConfig

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLER_BYTES_PER_LOGIT: Final = 48
"""Per logit: float32 copies, log-probabilities, and values with int64 places and float64 sums where rows are sorted."""
PROMPT_LOGPROBS_CHUNK: Final = 64
"""Positions of a prompt whose logits are in memory at a time."""
PROMPT_LOGPROBS_BYTES_PER_LOGIT: Final = 16
"""Per logit of a prompt: float32 copies, and what it takes to find the likeliest."""
GATHER_WORKSPACE_BYTES: Final = 64 << 20
"""Of K and V that attention on a CPU puts together at a time, in float32; one row may exceed it."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of weights, of the whole model or of a rank's share."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    """0 where the embedding serves as output head, too."""

    @property
    def total(self) -> int:
        """Of all parts."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def count_parameters(model: ModelConfig, ranks: int = 1) -> Parameters:
    """What the first of ``ranks`` ranks holds, which is as much as any: the whole model if there is one.

    Fewer KV heads than ranks are copied; norms and biases after a sum are whole on every rank.
    """
    hidden, layers = model.hidden_size, model.num_layers
    vocabulary = -(-model.vocab_size // ranks)
    shapes = _shapes(model, ranks)
    elements = {product: rows * columns for product, (rows, columns) in shapes.items()}
    outputs = {product: rows for product, (rows, _) in shapes.items()}
    qkv_bias, output_bias = _attention_biases(model)
    attention_biases = qkv_bias * outputs["qkv"] + output_bias * outputs["output"]
    mlp_biases = outputs["gate_up"] + outputs["down"] if model.mlp_bias else 0
    head_norms = 2 * model.head_dim if model.architecture == "Qwen3ForCausalLM" else 0
    return Parameters(
        embedding=vocabulary * hidden,
        attention=layers * (elements["qkv"] + elements["output"] + attention_biases),
        mlp=layers * (elements["gate_up"] + elements["down"] + mlp_biases),
        norms=layers * (2 * hidden + head_norms) + hidden,
        head=0 if model.tie_word_embeddings else vocabulary * hidden,
    )


def weight_bytes(model: ModelConfig, ranks: int, *, element_bytes: int, quantization: Quantization) -> int:
    """Bytes of a rank's weights; in fp8, matrices of attention and MLP take one byte, and each output a float32.

    What a quantized checkpoint leaves out stays as it is.
    """
    share = count_parameters(model, ranks)
    if quantization == "none":
        return share.total * element_bytes
    matrices = scales = 0
    for product, (rows, columns) in _shapes(model, ranks).items():
        count = sum((layer, product) not in model.unquantized for layer in range(model.num_layers))
        matrices += count * rows * columns
        scales += count * rows
    return matrices + 4 * scales + (share.total - matrices) * element_bytes


def _shapes(model: ModelConfig, ranks: int) -> dict[Product, tuple[int, int]]:
    """Rows and columns of a rank's matrices in each layer."""
    inner, hidden = model.intermediate_size // ranks, model.hidden_size
    query = model.num_heads * model.head_dim // ranks
    outputs = query + 2 * local_kv_heads(model, ranks) * model.head_dim
    return {
        "qkv": (outputs, hidden),
        "output": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def _largest_matrix(model: ModelConfig, ranks: int) -> int:
    """Elements of it, in any layer."""
    return max(rows * columns for rows, columns in _shapes(model, ranks).values())


def local_kv_heads(model: ModelConfig, ranks: int) -> int:
    """KV heads of one rank; with fewer heads than ranks, each rank holds a copy of one."""
    return max(1, model.num_kv_heads // ranks)


def kv_bytes_per_token(model: ModelConfig, ranks: int, element_bytes: int) -> int:
    """Bytes that one token takes in a rank's KV cache: K and V of every layer."""
    return 2 * model.num_layers * local_kv_heads(model, ranks) * model.head_dim * element_bytes


def estimate_working_bytes(config: Config, model: ModelConfig, *, ranks: int, element_bytes: int) -> int:
    """An upper estimate of what a rank's steps and tables take besides weights and KV cache; a GPU measures it instead.

    Activations of a full step (in float32 where norms and attention widen them), logits with the sampler's copies,
    gathered K and V, in the cache's type and in that of ``element_bytes``, and the tables of tokens and pages; on a CPU,
    also what its attention and its products in e4m3 widen to float32.
    """
    width = (
        6 * model.hidden_size + (4 * model.intermediate_size + 6 * model.num_heads * model.head_dim) // ranks
    )
    activations = config.max_num_batched_tokens * width * 4
    context = config.max_model_len or model.max_position_embeddings
    copied = 0 if config.kv_cache_dtype == AUTO else 1
    gathered = 2 * context * local_kv_heads(model, ranks) * model.head_dim * (element_bytes + copied)
    widened = 0
    if config.device == "cpu":
        gathered = max(gathered, 2 * GATHER_WORKSPACE_BYTES)
        widened = 4 * _largest_matrix(model, ranks) if config.quantization == "fp8" else 0
    tables = 4 * config.max_running_requests * (context + 1 + context // config.page_size + 1)
    return activations + estimate_sampling_bytes(config, model) + gathered + widened + tables


def estimate_sampling_bytes(config: Config, model: ModelConfig) -> int:
    """An upper estimate of what the choice of tokens takes, whatever requests ask for."""
    return model.vocab_size * max(
        config.max_running_requests * SAMPLER_BYTES_PER_LOGIT,
        min(config.max_num_batched_tokens, PROMPT_LOGPROBS_CHUNK) * PROMPT_LOGPROBS_BYTES_PER_LOGIT,
    )


def _attention_biases(model: ModelConfig) -> tuple[bool, bool]:
    """Whether the projections of query, key and value have biases, and whether the output's has."""
    if model.architecture == "Qwen2ForCausalLM":
        return True, False
    if model.architecture == "MistralForCausalLM":
        return False, False
    return model.attention_bias, model.attention_bias
