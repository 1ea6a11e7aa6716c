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


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): low frequencies are divided by ``factor``, high ones kept, with a ramp in between.

    A frequency is kept if it turns at least ``beta_fast`` times within the original context, and divided if it turns
    at most ``beta_slow`` times; ``truncate`` rounds the two bounds to whole dimensions, outwards. Cosines and sines
    are multiplied by ``attention_factor``, so that scores keep their spread over a longer context.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_position_embeddings(self) -> int:
        """Length in tokens of the context for which the scaling is made."""
        return int(self.factor * self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divisors of the head_dim / 2 frequencies, one for each: the scaling of Llama 3.1 as a GGUF file stores it."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | None
