"""Scaling of rotary position embeddings, as plain data; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every position is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by ``factor``, high ones kept, with a smooth band in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divisors of the head_dim / 2 frequencies, one for each: the scaling of Llama 3.1 as a GGUF file stores it."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors | None
