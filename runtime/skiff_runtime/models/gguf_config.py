"""The configuration of a model in a GGUF file, from the file's metadata; imports no torch.

The metadata is translated to the keys of a ``config.json``, so that both are checked by the same code. A key of the
architecture that is neither read here nor known to change nothing is refused by its name.
"""

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import GgufHeader, GgufTensor, UnreadArray, quote_value, read_header
from skiff_runtime.json_file import MAX_COUNT
from skiff_runtime.layers.rope_scaling import FrequencyFactors
from skiff_runtime.models.limits import MAX_LAYERS

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Skiff's classes by GGUF's architectures; Mistral's models are of the architecture ``llama``."""
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor that divides the rotary frequencies: how llama.cpp stores the scaling of Llama 3.1."""
TOKENS: Final = "tokenizer.ggml.tokens"
_END_TOKENS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING: Final = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_IGNORED: Final = ("rope.scaling.finetuned", "tensor_data_layout")
"""Keys of an architecture that change no computation."""
_ZERO: Final = (
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "nextn_predict_layers",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "pooling_type",
    "rope.scaling.yarn_log_multiplier",
)
"""Keys that say nothing where they are 0."""
_NEUTRAL: Final[dict[str, float | bool]] = {
    **dict.fromkeys(_ZERO, 0),
    "use_parallel_residual": False,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
}
"""The value with which a key says what is computed in any case; with any other, it is refused."""


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """Metadata as the keys of a ``config.json`` and a ``generation_config.json``, and the factors of the rotary
    frequencies, if the file has any."""

    config: dict[str, Any]
    generation: dict[str, Any]
    frequency_factors: FrequencyFactors | None


def read_gguf_config(path: Path) -> GgufConfig:
    """Read the configuration of the model in ``path``. Raises ``ModelError`` that names the file and the key."""
    header = read_header(path)
    meta = _Metadata(header)
    architecture = meta.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {quote_value(architecture)} is not supported in a GGUF file; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    meta.architecture = architecture
    meta.refuse_splits()
    heads = meta.own_count("attention.head_count")
    hidden = meta.own_count("embedding_length")
    head_dim = meta.own_count("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if meta.own_count(name, head_dim) != head_dim:
            raise meta.error(name, f"must be {head_dim}, the size of a head; other sizes are not supported")
    context = meta.own_count("context_length")
    window = meta.own_window()
    if window is not None and window < context and architecture != "llama":
        raise meta.error(
            "attention.sliding_window",
            "is not supported: models of this architecture have windows in some layers, which the file does not name",
        )
    has_biases = "blk.0.attn_q.bias" in header.tensors
    config = {
        "architectures": [
            "MistralForCausalLM"
            if architecture == "llama" and window is not None
            else ARCHITECTURES[architecture]
        ],
        "vocab_size": meta.own_count("vocab_size", meta.length(TOKENS)),
        "hidden_size": hidden,
        "intermediate_size": meta.own_count("feed_forward_length"),
        "num_hidden_layers": meta.own_count("block_count", limit=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.own_count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.own_number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_parameters": {"rope_theta": meta.own_number("rope.freq_base", 10000.0), **_rope_scaling(meta)},
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": has_biases and architecture != "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _dtype(header.tensors.values()),
        "bos_token_id": meta.token_id("bos_token_id"),
        "eos_token_id": sorted({token for name in _END_TOKENS if (token := meta.token_id(name)) is not None}),
    }
    if window is not None:
        config["sliding_window"] = window
    meta.refuse_unread()
    generation = {name: header.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return GgufConfig(config, generation, _frequency_factors(header, head_dim // 2))


class _Metadata:
    """Typed access to the metadata; ``own_*`` take keys under the architecture's prefix."""

    def __init__(self, header: GgufHeader) -> None:
        self._path = header.path
        self._values = header.metadata
        self._read: set[str] = set()
        self.architecture = ""

    def text(self, key: str) -> str:
        """Return a string, which must be there."""
        value = self._values.get(key)
        if not isinstance(value, str):
            raise ModelError(f"GGUF file {self._path}: {key!r} must be a string, not {quote_value(value)}")
        return value

    def length(self, key: str) -> int | None:
        """Return the length of an array, or None."""
        value = self._values.get(key)
        return value.length if isinstance(value, UnreadArray) else None

    def _own(self, name: str, default: Any) -> Any:
        """Return a value under the architecture's prefix, and remember that it was read."""
        self._read.add(name)
        return self._values.get(f"{self.architecture}.{name}", default)

    def own_text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._own(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {quote_value(value)}")
        return value

    def own_count(self, name: str, default: int | None = None, *, limit: int = MAX_COUNT) -> int:
        """Return a whole number from 1 to ``limit``. Arrays, of one number for each layer, are refused."""
        value = self._own(name, default)
        if isinstance(value, UnreadArray):
            raise self.error(name, "differs from layer to layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"must be a positive whole number, not {quote_value(value)}")
        if value > limit:
            raise self.error(name, f"must be at most {limit}, not {value}")
        return value

    def own_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._own(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, f"must be a number, not {quote_value(value)}")
        return float(value)

    def own_window(self) -> int | None:
        """Return the sliding window in tokens; None without one, which 0 says too."""
        name = "attention.sliding_window"
        return None if self._own(name, 0) == 0 else self.own_count(name)

    def token_id(self, name: str) -> int | None:
        """Return the token id under ``tokenizer.ggml``, if there is one."""
        key = f"tokenizer.ggml.{name}"
        value = self._values.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 0 <= value < (self.length(TOKENS) or 0)
        ):
            raise ModelError(
                f"GGUF file {self._path}: {key!r} must be a token of the vocabulary, not {quote_value(value)}"
            )
        return value

    def refuse_unread(self) -> None:
        """Raise ``ModelError`` for the first key of the architecture that was not read and could mean anything."""
        prefix = f"{self.architecture}."
        for key, value in self._values.items():
            name = key.removeprefix(prefix)
            if name == key or name in self._read or name in _IGNORED:
                continue
            if name not in _NEUTRAL or value != _NEUTRAL[name]:
                raise self.error(name, "is not supported")

    def refuse_splits(self) -> None:
        """Raise ``ModelError`` if the file is one of several that contain the model."""
        count = self._values.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            raise ModelError(
                f"GGUF file {self._path} is one of {count} parts of a model, which is not supported; merge them with "
                "llama.cpp's llama-gguf-split --merge"
            )

    def error(self, name: str, problem: str) -> ModelError:
        """Return an error about a key of the architecture."""
        return ModelError(f"GGUF file {self._path}: '{self.architecture}.{name}' {problem}")


def _rope_scaling(meta: _Metadata) -> dict[str, Any]:
    """Return the scaling of rotary embeddings under the names of a ``config.json``.

    As in llama.cpp, the factor is also found under its old name, 0 says that there is none, a scaling without a type
    is linear, and one without an original context has that of the model.
    """
    kind = meta.own_text("rope.scaling.type", "linear")
    old_factor = meta.own_number("rope.scale_linear", 0.0)
    factor = meta.own_number("rope.scaling.factor", old_factor) or 1.0
    original = meta.own_count("rope.scaling.original_context_length", meta.own_count("context_length"))
    betas = {name: meta.own_number(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = original
        scaling |= {name: value for name, value in betas.items() if value}
    return scaling


def _dtype(tensors: Collection[GgufTensor]) -> str:
    """Return the dtype in which the matrices are served: theirs; bfloat16 for quantized ones.

    Norms are stored as F32 in every file.
    """
    names = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    if names <= {"F32"}:
        return "float32"
    return "float16" if names <= {"F32", "F16"} else "bfloat16"


def _frequency_factors(header: GgufHeader, count: int) -> FrequencyFactors | None:
    """Read the factors of the ``count`` rotary frequencies, if the file has any."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise ModelError(
            f"GGUF file {header.path}: tensor {ROPE_FACTORS!r} must be F32 of {count} elements, not "
            f"{tensor.type.name} of {list(tensor.shape)}"
        )
    with header.path.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = struct.unpack(f"<{count}f", stream.read(tensor.nbytes))
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"GGUF file {header.path}: tensor {ROPE_FACTORS!r} must be above 0")
    return FrequencyFactors(factors)
