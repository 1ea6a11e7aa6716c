"""RoPE settings of a model, read from its configuration; imports no torch."""

from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.layers.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling

SUPPORTED_TYPES: Final = ("default", "linear", "llama3")


def read_rope(config: JsonObject) -> tuple[float, RopeScaling]:
    """Return base (theta) and scaling, from ``rope_parameters`` or the older ``rope_theta`` with ``rope_scaling``.

    Raises ``ModelError`` for settings that are malformed or not supported.
    """
    rope = config.object("rope_parameters") or config.object("rope_scaling") or JsonObject(config.source, {})
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 0:
        raise ModelError(f"{config.source}: 'rope_theta' must be above 0, not {theta:g}")
    for source in (config, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{source.source}: 'partial_rotary_factor' other than 1 is not supported")
    return theta, _read_scaling(rope)


def _read_scaling(rope: JsonObject) -> RopeScaling:
    kind = rope.text("rope_type", rope.text("type", "default"))
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
    raise ModelError(
        f"{rope.source}: rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
    )


def _positive(rope: JsonObject, key: str) -> float:
    value = rope.number(key)
    if value <= 0:
        raise ModelError(f"{rope.source}: {key!r} must be above 0, not {value:g}")
    return value
