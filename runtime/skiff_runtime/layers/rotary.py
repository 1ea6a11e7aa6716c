"""Rotary position embedding, RoPE (Su et al., 2021): the table of cosines and sines."""

import math
from dataclasses import dataclass

import torch

from skiff_runtime.layers.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling
from skiff_runtime.layers.sharding import LayerContext


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """Inputs by which every layer of a step rotates and stores the heads of its T tokens (``kernels.qk_norm_rope``).

    ``cos_sin`` [positions, 2, head_dim] is the table of cosines and sines, ``positions`` int[T] its indices, and
    ``slot_mapping`` int[T] the tokens' offsets in the KV cache.
    """

    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class RotaryEmbedding:
    """Cosines and sines of positions 0 to ``length - 1``, in the model's dtype."""

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling, *, length: int, context: LayerContext
    ) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
        cos, sin = angles.cos(), angles.sin()
        # The sine of the first half is negated, so that a rotation is x * cos + swap_halves(x) * sin.
        table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
        self._cos_sin = table.to(device=context.device, dtype=context.dtype)

    def for_step(self, positions: torch.Tensor, slot_mapping: torch.Tensor) -> RopeInputs:
        """Bind the table to the tokens of one step, for all of its layers."""
        return RopeInputs(self._cos_sin, positions, slot_mapping)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Return the angle per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _scale_as_llama3(frequencies, scaling)
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
