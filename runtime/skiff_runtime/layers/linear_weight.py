"""The matrix of a linear layer, as a rank keeps it: in the model's own type, or in eight bits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.e4m3 import empty_fp8_weight
from skiff_runtime.kernels.fp8 import ALIGNMENT, Activations, fp8_linear, quantize_activations
from skiff_runtime.kernels.linear import linear
from skiff_runtime.layers.sharding import LayerContext


@dataclass(frozen=True, slots=True)
class Rows:
    """Some outputs of a matrix: ``values`` [n, inputs], and ``scales`` float32 [n, 1] where these are in e4m3."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


class Weight(ABC):
    """A matrix [outputs, inputs]."""

    @abstractmethod
    def product(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, inputs] -> [T, outputs], in the model's type."""

    @abstractmethod
    def split(self, sizes: Sequence[int]) -> list[Rows]:
        """The matrix in runs of so many outputs, as views to be filled."""


class UnquantizedLinearWeight(Weight):
    """In the model's type."""

    def __init__(self, outputs: int, inputs: int, placement: LayerContext) -> None:
        self.values = placement.empty(outputs, inputs)

    def product(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The plain product; x must not be rounded."""
        assert isinstance(x, torch.Tensor)
        return linear(x, self.values, bias)

    def split(self, sizes: Sequence[int]) -> list[Rows]:
        """Views of the values alone."""
        return [Rows(values) for values in torch.split(self.values, list(sizes))]


class Fp8LinearWeight(Weight):
    """In e4m3 with one scale for each output; activations are rounded likewise, with one scale for each token."""

    def __init__(self, outputs: int, inputs: int, placement: LayerContext) -> None:
        if placement.device.type == "cuda" and (outputs % ALIGNMENT or inputs % ALIGNMENT):
            raise ConfigError(
                f"--quantization fp8 needs matrices whose sizes are multiples of {ALIGNMENT} on each rank, but one is "
                f"{outputs} x {inputs}; use another --tp, or --quantization none"
            )
        self._bound = placement.activation_scale_ub
        self.matrix = empty_fp8_weight(outputs, inputs, placement.device)

    def product(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The scaled product; x is rounded if it is not."""
        rounded = quantize_activations(x, self._bound) if isinstance(x, torch.Tensor) else x
        return fp8_linear(rounded, self.matrix, bias)

    def split(self, sizes: Sequence[int]) -> list[Rows]:
        """Views of values and scales."""
        values, scales = (torch.split(each, list(sizes)) for each in (self.matrix.values, self.matrix.scales))
        return [Rows(*parts) for parts in zip(values, scales, strict=True)]


def make_weight(outputs: int, inputs: int, placement: LayerContext) -> Weight:
    """A matrix that is yet to be filled."""
    kind = Fp8LinearWeight if placement.quantization == "fp8" else UnquantizedLinearWeight
    return kind(outputs, inputs, placement)
