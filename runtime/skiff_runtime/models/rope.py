"""RoPE settings of a model, read from its configuration or from ``--rope-scaling``; imports no torch."""

import json
import math
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.layers.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from skiff_runtime.models.limits import MAX_POSITIONS

SUPPORTED_TYPES: Final = ("default", "linear", "llama3", "yarn")
FLAG: Final = "--rope-scaling"
EXAMPLE: Final = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
_REASONS: Final = {
    "dynamic": "dynamic NTK changes the frequencies while a sequence grows, but cached keys keep the old ones",
    "longrope": "a sequence that outgrows the original context changes its frequencies, but cached keys keep the "
    "old ones",
}
"""Why a type cannot be computed, for types that checkpoints use."""
_YARN_KEYS: Final = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "partial_rotary_factor",
        "finetuned",
    )
)
"""``partial_rotary_factor`` is checked for every type. ``finetuned`` is a note of some checkpoints about their training,
which changes nothing."""


def read_rope(
    config: JsonObject, option: str | None = None, *, default_theta: float = 10000.0
) -> tuple[float, RopeScaling]:
    """Return base (theta) and scaling, from ``rope_parameters`` or the older ``rope_theta`` with ``rope_scaling``.

    ``option`` is the value of ``--rope-scaling``, which takes the place of the model's scaling and leaves its base.
    ``default_theta`` is the base where none is named. Raises ``ModelError`` for settings that are malformed or not
    supported.
    """
    rope = _find_rope(config)
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    chosen = rope if option is None else _parse_option(option)
    theta = chosen.number("rope_theta", theta)
    if theta <= 0:
        raise ModelError(f"{chosen.source}: 'rope_theta' must be above 0, not {theta:g}")
    for source in (config, rope, chosen):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{source.source}: 'partial_rotary_factor' other than 1 is not supported")
    if option is not None:
        original = chosen.positive("original_max_position_embeddings")
        return theta, _read_yarn(chosen, theta, _positive(chosen, "factor"), original)
    return theta, _read_scaling(chosen, config, theta)


def _find_rope(config: JsonObject) -> JsonObject:
    """Return the object with the model's rope settings; an empty one if there is none."""
    found = [config.object(name) for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    if len(found) > 1 and config.get("rope_parameters") != config.get("rope_scaling"):
        raise ModelError(f"{config.source} has both 'rope_parameters' and 'rope_scaling'; remove one of them")
    rope = next(iter(found), None) or JsonObject(config.source, {})
    for key in rope.list_keys():
        if isinstance(rope.get(key), dict):
            raise ModelError(f"{rope.source}: settings for each type of layer ({key!r}) are not supported")
    return rope


def _parse_option(text: str) -> JsonObject:
    """Parse the value of ``--rope-scaling``, which must be that of YaRN."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ModelError(f"{FLAG} must be a JSON object such as {EXAMPLE}, not {text!r}")
    rope = JsonObject(FLAG, values)
    if (kind := _read_type(rope)) != "yarn":
        raise ModelError(f"{FLAG}: 'rope_type' must be 'yarn', not {kind!r}")
    return rope


def _read_type(rope: JsonObject) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _read_scaling(rope: JsonObject, config: JsonObject, theta: float) -> RopeScaling:
    kind = _read_type(rope)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor"))
    if kind == "llama3":
        low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
        if high <= low:
            raise ModelError(f"{rope.source}: 'high_freq_factor' must exceed 'low_freq_factor'")
        original = rope.positive("original_max_position_embeddings")
        return Llama3Scaling(_positive(rope, "factor"), low, high, original)
    if kind == "yarn":
        return _read_yarn(rope, theta, *_find_yarn_lengths(rope, config))
    reason = f" ({_REASONS[kind]})" if kind in _REASONS else ""
    raise ModelError(
        f"{rope.source}: rope type {kind!r} is not supported{reason}; supported are {', '.join(SUPPORTED_TYPES)}. "
        f"{FLAG} serves the model with YaRN instead, for example {FLAG} '{EXAMPLE}'"
    )


def _find_yarn_lengths(rope: JsonObject, config: JsonObject) -> tuple[float, int]:
    """Return factor and original context of a checkpoint, each with the default that transformers gives it."""
    positions = config.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", positions)
    original = config.positive("original_max_position_embeddings", original)
    default = positions / original if positions != original else None
    return rope.number("factor", default), original


def _read_yarn(rope: JsonObject, theta: float, factor: float, original: int) -> YarnScaling:
    """Return YaRN's settings, of which ``factor`` and ``original``, the original context, were read before."""
    unknown = sorted(frozenset(rope.list_keys()) - _YARN_KEYS)
    if unknown:
        raise ModelError(f"{rope.source}: {unknown[0]!r} is not a setting of YaRN that is supported")
    if factor < 1:
        raise ModelError(f"{rope.source}: 'factor' must be at least 1, not {factor:g}")
    if factor * original > MAX_POSITIONS:
        raise ModelError(
            f"{rope.source}: a context of {original} tokens times {factor:g} exceeds {MAX_POSITIONS} tokens"
        )
    if theta <= 1:
        raise ModelError(f"{rope.source}: 'rope_theta' must be above 1 for YaRN, not {theta:g}")
    fast, slow = _positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0)
    if fast < slow:
        raise ModelError(f"{rope.source}: 'beta_fast' must be at least 'beta_slow', which is {slow:g}")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_read_attention_factor(rope, factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
    )


def _read_attention_factor(rope: JsonObject, factor: float) -> float:
    """Return the factor of cosines and sines; if none is given, that of the paper or DeepSeek's, as transformers does."""
    if rope.get("attention_factor") is not None:
        return _positive(rope, "attention_factor")
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _positive(rope: JsonObject, key: str, default: float | None = None) -> float:
    value = rope.number(key, default)
    if value <= 0:
        raise ModelError(f"{rope.source}: {key!r} must be above 0, not {value:g}")
    return value
