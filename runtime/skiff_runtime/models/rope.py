"""Rotary position embedding as a model's configuration asks for it; pure host data."""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import Fields

SERVED_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided by ``factor``, a smooth band in between, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling | None


def read_rope(config: Fields) -> tuple[float, RopeScaling]:
    """Base and scaling, from ``rope_parameters`` or the older ``rope_theta`` with ``rope_scaling``."""
    rope = config.object("rope_parameters") or config.object("rope_scaling") or Fields(config.source, {})
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 0:
        raise ModelError(f"{config.source}: 'rope_theta' must be above 0, not {theta:g}")
    for source in (config, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{source.source}: 'partial_rotary_factor' other than 1 is not supported")
    return theta, _scaling(rope)


def _scaling(rope: Fields) -> RopeScaling:
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
        f"{rope.source}: rope type {kind!r} is not supported; supported are {', '.join(SERVED_TYPES)}"
    )


def _positive(rope: Fields, key: str) -> float:
    value = rope.number(key)
    if value <= 0:
        raise ModelError(f"{rope.source}: {key!r} must be above 0, not {value:g}")
    return value
