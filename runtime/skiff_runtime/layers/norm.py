"""Root-mean-square normalization (Zhang and Sennrich, 2019), alone, after a residual sum, or per head."""

from collections.abc import Iterator

import torch

from skiff_runtime.kernels.fp8 import Activations, add_rms_norm_quantize, quantize_activations
from skiff_runtime.kernels.rms_norm import add_rms_norm, rms_norm
from skiff_runtime.layers.sharding import LayerContext, Piece, whole


class RMSNorm:
    """[T, size] -> the same shape; every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, placement: LayerContext) -> None:
        self.weight = placement.empty(size)
        self._eps = eps

    def add_and_normalize(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self._eps)

    def pieces(self, name: str) -> Iterator[Piece]:
        """The checkpoint tensor that fills this layer."""
        yield whole(f"{name}.weight", self.weight)


class QuantizingRMSNorm:
    """Norm before linear layers: rounds what it gives them where their matrices are in eight bits."""

    def __init__(self, size: int, eps: float, placement: LayerContext) -> None:
        self.weight = placement.empty(size)
        self._eps = eps
        self._rounds = placement.quantization == "fp8"
        self._bound = placement.activation_scale_ub

    def __call__(self, x: torch.Tensor) -> Activations:
        normed = rms_norm(x, self.weight, self._eps)
        return quantize_activations(normed, self._bound) if self._rounds else normed

    def add_and_normalize(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """(normalized x + residual, x + residual)."""
        if self._rounds:
            return add_rms_norm_quantize(x, residual, self.weight, self._eps, self._bound)
        return add_rms_norm(x, residual, self.weight, self._eps)

    def pieces(self, name: str) -> Iterator[Piece]:
        """The checkpoint tensor that fills this layer."""
        yield whole(f"{name}.weight", self.weight)


class QKNorm:
    """What normalizes each head of queries and keys: ``weights`` [2, size], one for q and one for k."""

    def __init__(self, size: int, eps: float, placement: LayerContext) -> None:
        self.weights = placement.empty(2, size)
        self.eps = eps

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """The checkpoint tensors that fill this layer."""
        yield whole(f"{prefix}q_norm.weight", self.weights[0])
        yield whole(f"{prefix}k_norm.weight", self.weights[1])
