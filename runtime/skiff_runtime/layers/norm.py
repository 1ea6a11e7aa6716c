"""RMSNorm (Zhang and Sennrich, 2019): alone, fused with the residual addition, or per head."""

from collections.abc import Iterator

import torch

from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.rms_norm import add_rms_norm, rms_norm
from skiff_runtime.layers.activation_quantizer import ActivationQuantizer, make_activation_quantizer
from skiff_runtime.layers.lora import DeferredExpand
from skiff_runtime.layers.partial_sum import (
    ExchangedSum,
    LayerOutput,
    PartialProduct,
    PartialSum,
    reduce_output,
)
from skiff_runtime.layers.sharding import LayerContext, WeightShard, replicated_weight


class RMSNorm:
    """[T, size] -> the same shape; every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        self.weight = context.empty(size)
        self._eps = eps

    def add_and_normalize(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self._eps)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yield the checkpoint tensor that fills this layer."""
        yield replicated_weight(f"{name}.weight", self.weight)


class QuantizingRMSNorm:
    """RMSNorm before linear layers; quantizes its output as their matrices need it.

    In a step with adapters it does not: LoRA reads the activations as they are, and the matrices quantize them.
    """

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        self.weight = context.empty(size)
        self.eps = eps
        self._own_quantizer = make_activation_quantizer(context)
        self._context = context

    @property
    def _quantizer(self) -> ActivationQuantizer | None:
        return None if self._context.has_adapters else self._own_quantizer

    def __call__(self, x: torch.Tensor) -> Activations:
        normed, quantizer = rms_norm(x, self.weight, self.eps), self._quantizer
        return normed if quantizer is None else quantizer.quantize(normed)

    def add_and_normalize(
        self, x: LayerOutput, residual: torch.Tensor, next_matrix: torch.Tensor | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """Return (norm(x + residual), x + residual); a partial sum is completed by the same kernel where it can be.

        ``next_matrix``, which the result is multiplied with, may be prefetched.
        """
        quantizer = self._quantizer
        if isinstance(x, DeferredExpand):
            assert quantizer is None
            return add_rms_norm(x.out, residual, self.weight, self.eps, x.expand)
        if isinstance(x, PartialProduct):
            if quantizer is None:
                return x.group.linear_all_reduce_add_rms_norm(
                    x.x, x.matrix, residual, self.weight, self.eps, next_matrix
                )
            x = x.multiply()
        if isinstance(x, PartialSum) and x.bias is None:
            if quantizer is not None:
                return quantizer.all_reduce_add_rms_norm(x.group, x.part, residual, self.weight, self.eps)
            return x.group.all_reduce_add_rms_norm(x.part, residual, self.weight, self.eps)
        if isinstance(x, ExchangedSum) and x.bias is None:
            if quantizer is not None:
                return quantizer.add_rms_norm(x.part, residual, self.weight, self.eps, x.other)
            return add_rms_norm(x.part, residual, self.weight, self.eps, other=x.other)
        output = reduce_output(x)
        if quantizer is not None:
            return quantizer.add_rms_norm(output, residual, self.weight, self.eps)
        return add_rms_norm(output, residual, self.weight, self.eps)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yield the checkpoint tensor that fills this layer."""
        yield replicated_weight(f"{name}.weight", self.weight)


class QKNorm:
    """RMSNorm of each head of queries and keys: ``weights`` [2, size], one line for q and one for k."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        self.weights = context.empty(2, size)
        self.eps = eps

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the checkpoint tensors that fill this layer."""
        yield replicated_weight(f"{prefix}q_norm.weight", self.weights[0])
        yield replicated_weight(f"{prefix}k_norm.weight", self.weights[1])
