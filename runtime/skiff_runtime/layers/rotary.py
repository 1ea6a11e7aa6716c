"""Rotary position embedding (Su et al., 2021): tables of cosines and sines."""

import math
from dataclasses import dataclass

import torch

from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.rope import LinearScaling, Llama3Scaling, RopeScaling


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """A step's tokens, as every layer turns and stores their heads (see ``kernels.heads``).

    ``table`` [positions, 2, head_dim] are cosines and sines, ``positions`` and ``slot_mapping`` int[T].
    """

    table: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class RotaryEmbedding:
    """Cosines and sines of positions 0 to ``length - 1``, in the model's type."""

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling, *, length: int, placement: LayerContext
    ) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
        self._table = table.to(device=placement.device, dtype=placement.dtype)

    def at(self, positions: torch.Tensor, slot_mapping: torch.Tensor) -> RopeInputs:
        """For all layers of a step."""
        return RopeInputs(self._table, positions, slot_mapping)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Angle per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Meta's scaling of Llama 3.1: wavelengths beyond the old context are stretched, with a smooth band."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long = wavelengths > original / low
    short = wavelengths < original / high
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, blended))
