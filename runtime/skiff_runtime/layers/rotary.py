"""Rotary position embedding, RoPE (Su et al., 2021): the table of cosines and sines."""

import math

import torch

from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.layers.rope_scaling import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from skiff_runtime.layers.sharding import LayerContext


class RotaryEmbedding:
    """Cosines and sines of positions 0 to ``length - 1``, in the model's dtype."""

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling, *, length: int, context: LayerContext
    ) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
        cos, sin = angles.cos(), angles.sin()
        if isinstance(scaling, YarnScaling):
            cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
        # The sine of the first half is negated, so that a rotation is x * cos + swap_halves(x) * sin.
        table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
        self._cos_sin = table.to(device=context.device, dtype=context.dtype)

    def for_step(self, positions: torch.Tensor, slot_mapping: torch.Tensor) -> RopeInputs:
        """Bind the table to the tokens of one step, for all of its layers."""
        return RopeInputs(self._cos_sin, positions, slot_mapping)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Return the angle per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = theta**exponents
    frequencies = 1.0 / periods
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _scale_as_llama3(frequencies, scaling)
        case YarnScaling():
            return _scale_as_yarn(periods, theta, scaling)
        case FrequencyFactors():
            return frequencies / torch.tensor(scaling.factors)
    return frequencies


def _scale_as_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Stretch wavelengths beyond the original context, with a smooth band, as Meta does in Llama 3.1."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long = wavelengths > original / low
    short = wavelengths < original / high
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, blended))


def _scale_as_yarn(periods: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Return frequencies between ``1 / periods`` and ``factor`` times less, along YaRN's ramp over the dimensions.

    The operations are those of transformers in the same order, so that both round alike.
    """
    half = len(periods)
    low, high = _find_yarn_range(2 * half, theta, scaling)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _find_yarn_range(dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """Return the dimensions at which the ramp begins and ends, those that turn ``beta_fast`` and ``beta_slow`` times."""

    def dimension_of(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)
