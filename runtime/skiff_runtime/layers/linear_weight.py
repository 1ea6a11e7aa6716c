"""The matrix of a linear layer as a rank keeps it: in the model's dtype, or quantized to FP8."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.fp8 import (
    ALIGNMENT,
    Activations,
    fp8_linear,
    quantize_activations,
)
from skiff_runtime.kernels.fp8_tensors import empty_fp8_weight
from skiff_runtime.kernels.linear import linear
from skiff_runtime.layers.sharding import LayerContext


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Some outputs of a matrix: ``values`` [n, inputs], and ``scales`` float32 [n, 1] where the values are FP8."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


class LinearWeight(ABC):
    """A matrix [outputs, inputs]."""

    @abstractmethod
    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [T, inputs] -> [T, outputs], in the model's dtype."""

    @abstractmethod
    def split(self, sizes: Sequence[int]) -> list[WeightRows]:
        """Return views of consecutive runs of ``sizes`` outputs, to be filled."""


class UnquantizedLinearWeight(LinearWeight):
    """A matrix in the model's dtype."""

    def __init__(self, outputs: int, inputs: int, context: LayerContext) -> None:
        self.values = context.empty(outputs, inputs)

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x``, which must not be quantized."""
        assert isinstance(x, torch.Tensor)
        return linear(x, self.values, bias)

    def split(self, sizes: Sequence[int]) -> list[WeightRows]:
        """Return views of the values; there are no scales."""
        return [WeightRows(values) for values in torch.split(self.values, list(sizes))]


class Fp8LinearWeight(LinearWeight):
    """A matrix in FP8 (e4m3) with one scale per output. Activations are quantized with one scale per token."""

    def __init__(self, outputs: int, inputs: int, context: LayerContext) -> None:
        if context.device.type == "cuda" and (outputs % ALIGNMENT or inputs % ALIGNMENT):
            raise ConfigError(
                f"--quantization fp8 needs matrices whose sizes are multiples of {ALIGNMENT} on each rank, but one is "
                f"{outputs} x {inputs}; use another --tp, or --quantization none"
            )
        self._scale_ub = context.activation_scale_ub
        self.matrix = empty_fp8_weight(outputs, inputs, context.device)

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply with scales; quantize ``x`` if it is not yet."""
        quantized = quantize_activations(x, self._scale_ub) if isinstance(x, torch.Tensor) else x
        return fp8_linear(quantized, self.matrix, bias)

    def split(self, sizes: Sequence[int]) -> list[WeightRows]:
        """Return views of values and scales."""
        values, scales = (torch.split(each, list(sizes)) for each in (self.matrix.values, self.matrix.scales))
        return [WeightRows(*parts) for parts in zip(values, scales, strict=True)]


def make_weight(outputs: int, inputs: int, context: LayerContext) -> LinearWeight:
    """Allocate an uninitialized matrix of the context's quantization."""
    kind = Fp8LinearWeight if context.quantization == "fp8" else UnquantizedLinearWeight
    return kind(outputs, inputs, context)
