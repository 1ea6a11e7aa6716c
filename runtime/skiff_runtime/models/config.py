"""The configuration of a model, read from its Hugging Face directory or its GGUF file and checked once.

It imports no torch, so that the front processes can read end tokens and defaults too. Every setting of a
``config.json`` that is known to change the computation in a way that Skiff does not support is
refused here by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skiff_runtime.config import Quantization
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.json_file import JsonObject, read_json
from skiff_runtime.layers.moe_config import MoeConfig
from skiff_runtime.layers.projections import UnquantizedProjections
from skiff_runtime.layers.rope_scaling import RopeScaling, YarnScaling
from skiff_runtime.layers.weight_format import WeightFormat
from skiff_runtime.models.embedding_config import (
    EmbeddingConfig,
    causal_architecture,
    is_headless,
    read_embedding_config,
)
from skiff_runtime.models.gguf_config import ROPE_FACTORS, read_gguf_config
from skiff_runtime.models.limits import MAX_LAYERS, MAX_POSITIONS
from skiff_runtime.models.moe import read_moe
from skiff_runtime.models.quantization import (
    check_expert_format,
    find_unquantized_projections,
    read_activation_scale_ub,
    read_quantization,
)
from skiff_runtime.models.rope import read_rope
from skiff_runtime.models.sliding_window import SlidingWindows, WindowDefaults, read_sliding_windows

DTYPES: Final = ("float32", "bfloat16", "float16")
MAX_TOP_K: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ArchitectureDefaults:
    """Defaults for absent keys of one architecture's ``config.json``, and its sliding windows if it can have any."""

    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    windows: WindowDefaults | None = None


QWEN_WINDOWS: Final = WindowDefaults(4096, needs_flag=True, by_layer=True)
ARCHITECTURES: Final[dict[str, ArchitectureDefaults]] = {
    "LlamaForCausalLM": ArchitectureDefaults(),
    "MistralForCausalLM": ArchitectureDefaults(windows=WindowDefaults(4096)),
    "MixtralForCausalLM": ArchitectureDefaults(
        rope_theta=1e6, rms_norm_eps=1e-5, windows=WindowDefaults(None)
    ),
    "Qwen2ForCausalLM": ArchitectureDefaults(windows=QWEN_WINDOWS),
    "Qwen3ForCausalLM": ArchitectureDefaults(head_dim=128, windows=QWEN_WINDOWS),
    "Qwen3MoeForCausalLM": ArchitectureDefaults(windows=WindowDefaults(4096, needs_flag=True)),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that ``generation_config.json`` recommends; ``None`` where it recommends none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder model. Sizes are of the whole model, not of one rank's shard.

    ``path`` is its directory, or its GGUF file. ``tokenizer_path`` is the directory of tokenizer.json: ``path``, unless
    it had to be converted. ``moe`` is None for a dense model; ``intermediate_size`` is that of dense MLPs.
    ``max_position_embeddings`` is the longest context, which YaRN's factor extends.
    ``sliding_windows`` has the window of each layer in tokens, None for full attention and for a window that no served
    sequence exceeds. ``quantization``, ``weight_format`` and ``unquantized`` are the method of a quantized checkpoint,
    the format of its matrices, and the projections that have none. ``activation_scale_ub``, if there is one, is its
    upper bound of an activation's magnitude. ``embedding_only``: the checkpoint has no output head, so the token
    embedding stands in for it, and nothing is generated.
    """

    path: Path
    tokenizer_path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe: MoeConfig | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    sliding_windows: SlidingWindows
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    quantization: Quantization
    weight_format: WeightFormat | None
    unquantized: UnquantizedProjections
    activation_scale_ub: float | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    embedding: EmbeddingConfig
    embedding_only: bool


def read_model_config(
    path: Path, *, max_model_len: int | None = None, rope_scaling: str | None = None
) -> ModelConfig:
    """Read and check ``config.json`` and, where present, ``generation_config.json``; or a GGUF file's metadata.

    ``max_model_len`` is the longest sequence that will be served, if the user set one, and ``rope_scaling`` the value
    of ``--rope-scaling``. Raises ``ModelError`` with one message that names the file or the flag, and the key.
    """
    factors: RopeScaling = None
    if is_gguf(path) and path.is_file():
        described = read_gguf_config(path)
        config, factors = JsonObject(str(path), described.config), described.frequency_factors
        generation = JsonObject(str(path), described.generation)
    else:
        config, generation = _read_config_files(path)
    named = _architecture(config)
    architecture = causal_architecture(named)
    embedding_only = is_headless(path, config, named)
    defaults = ARCHITECTURES[architecture]
    _refuse_unsupported(config)
    theta, scaling = read_rope(config, rope_scaling, default_theta=defaults.rope_theta)
    if factors is not None and rope_scaling is None:
        if scaling is not None:
            raise ModelError(
                f"{path}: tensor {ROPE_FACTORS!r} beside a scaling of the metadata (rope.scaling) is not supported"
            )
        scaling = factors
    heads, kv_heads, head_dim = _heads(config, defaults)
    positions = config.positive("max_position_embeddings", limit=MAX_POSITIONS)
    if isinstance(scaling, YarnScaling):
        positions = scaling.max_position_embeddings
    layers = config.positive("num_hidden_layers", limit=MAX_LAYERS)
    moe = read_moe(config, architecture, layers)
    quantization = read_quantization(config)
    unquantized = find_unquantized_projections(quantization, layers, moe)
    if moe is not None:
        check_expert_format(quantization, unquantized, moe, layers)
    return ModelConfig(
        path=path,
        tokenizer_path=path,
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=(hidden_size := config.positive("hidden_size")),
        intermediate_size=config.positive("intermediate_size"),
        moe=moe,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", defaults.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        sliding_windows=read_sliding_windows(
            config, defaults.windows, layers=layers, max_sequence=min(positions, max_model_len or positions)
        ),
        tie_word_embeddings=embedding_only or config.flag("tie_word_embeddings"),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        dtype=_dtype(config),
        quantization=quantization.method,
        weight_format=quantization.weight_format,
        unquantized=unquantized,
        activation_scale_ub=read_activation_scale_ub(config),
        bos_token_id=next(
            iter(config.token_ids("bos_token_id") or generation.token_ids("bos_token_id")), None
        ),
        eos_token_ids=tuple(
            sorted({*config.token_ids("eos_token_id"), *generation.token_ids("eos_token_id")})
        ),
        sampling=_sampling_defaults(generation),
        embedding=read_embedding_config(path, config, hidden_size),
        embedding_only=embedding_only,
    )


def check_tp_size(config: ModelConfig, tp_size: int, *, expert_parallel: bool = False) -> None:
    """Raise ``ConfigError`` if the model cannot be sharded over ``tp_size`` ranks."""
    counts = [(config.num_heads, "attention heads")]
    if config.moe is None and expert_parallel:
        raise ConfigError(f"--expert-parallel is for mixtures of experts, and {config.architecture} is dense")
    if config.moe is None or config.moe.dense_layers:
        counts.append((config.intermediate_size, "MLP columns"))
    if config.moe is not None and expert_parallel:
        counts.append((config.moe.num_experts, "experts, as --expert-parallel needs"))
    elif config.moe is not None:
        counts.append(
            (config.moe.intermediate_size, "columns of an expert; --expert-parallel keeps experts whole")
        )
    for count, noun in counts:
        if count % tp_size:
            raise ConfigError(f"--tp {tp_size} does not divide the model's {count} {noun}")
    kv_heads = config.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"--tp {tp_size} must divide the model's {kv_heads} KV heads, or be a multiple of them"
        )


def _architecture(config: JsonObject) -> str:
    """Return the first class that is supported, with an output head (LlamaForCausalLM) or without (LlamaModel)."""
    named = config.get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named) or not named:
        raise ModelError(f"{config.source} must name the model's class in 'architectures'")
    for name in named:
        if causal_architecture(name) in ARCHITECTURES:
            return str(name)
    raise ModelError(
        f"{config.source}: architecture {', '.join(named)} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: JsonObject) -> None:
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{config.source}: activation {activation!r} is not supported; supported is 'silu'")
    if not config.flag("is_causal", True) or config.flag("use_bidirectional_attention"):
        raise ModelError(f"{config.source}: bidirectional attention ('is_causal' false) is not supported")


def _heads(config: JsonObject, defaults: ArchitectureDefaults) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head dimension)."""
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{config.source}: {kv_heads} KV heads do not divide {heads} attention heads")
    hidden = config.positive("hidden_size")
    if config.get("head_dim") is None and defaults.head_dim is None and hidden % heads:
        raise ModelError(f"{config.source}: {heads} attention heads do not divide hidden size {hidden}")
    head_dim = config.positive("head_dim", defaults.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{config.source}: 'head_dim' must be even, not {head_dim}")
    return heads, kv_heads, head_dim


def _dtype(config: JsonObject) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(
            f"{config.source}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    return name


def _read_config_files(path: Path) -> tuple[JsonObject, JsonObject]:
    """Return config.json and generation_config.json (empty if there is none) of a directory."""
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        raise ModelError(
            f"model directory {path} {problem}; --model takes a directory with config.json and weights, or a GGUF file"
        )
    config, generation = path / "config.json", path / "generation_config.json"
    return (
        JsonObject(str(config), read_json(config)),
        JsonObject(str(generation), read_json(generation) if generation.exists() else {}),
    )


def _sampling_defaults(generation: JsonObject) -> SamplingDefaults:
    def optional(key: str, low: float, high: float) -> float | None:
        value = None if generation.get(key) is None else generation.number(key)
        if value is not None and not low <= value <= high:
            raise ModelError(f"{generation.source}: {key!r} must be from {low:g} to {high:g}, not {value:g}")
        return value

    top_k = optional("top_k", -1, MAX_TOP_K)
    return SamplingDefaults(
        temperature=optional("temperature", 0, 100),
        top_k=None if top_k is None else int(top_k),
        top_p=optional("top_p", 0, 1),
        min_p=optional("min_p", 0, 1),
    )
