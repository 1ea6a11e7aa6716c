"""Quantization of a linear layer's input by the kernel that makes it: the norm or the SwiGLU product before it."""

from abc import ABC, abstractmethod

import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.kernels.fp8 import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_groups,
    quantize_activations,
    quantize_grouped_activations,
    silu_and_mul_quantize,
    silu_and_mul_quantize_groups,
)
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.layers.weight_format import Fp8Format


class ActivationQuantizer(ABC):
    """Quantizes activations [T, n], alone or together with what makes them."""

    @abstractmethod
    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """Quantize ``x`` by a launch of its own."""

    @abstractmethod
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        other: torch.Tensor | None = None,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Return (the quantized RMSNorm of the sum, the sum) of ``x``, ``other`` and ``residual``; ``x`` may be overwritten."""

    def all_reduce_add_rms_norm(
        self,
        group: TensorParallelGroup,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Do what ``add_rms_norm`` does with the sum of ``x`` over the ranks of ``group``; ``x`` may be overwritten."""
        return self.add_rms_norm(group.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> QuantizedActivations:
        """Return SwiGLU's product of gate_up [T, 2n], quantized."""


class TokenQuantizer(ActivationQuantizer):
    """One scale for each token; magnitudes beyond ``bound`` become the bound."""

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        return quantize_activations(x, self._bound)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        other: torch.Tensor | None = None,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        return add_rms_norm_quantize(x, residual, weight, eps, self._bound, other)

    def all_reduce_add_rms_norm(
        self,
        group: TensorParallelGroup,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Sum, normalize and quantize in one kernel where there is one."""
        return group.all_reduce_add_rms_norm_quantize(x, residual, weight, eps, self._bound)

    def silu_and_mul(self, gate_up: torch.Tensor) -> QuantizedActivations:
        return silu_and_mul_quantize(gate_up, self._bound)


class GroupQuantizer(ActivationQuantizer):
    """One scale for each 128 elements of a token."""

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        return quantize_grouped_activations(x)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        other: torch.Tensor | None = None,
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        x = x if other is None else x.add_(other)
        return add_rms_norm_quantize_groups(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> QuantizedActivations:
        return silu_and_mul_quantize_groups(gate_up)


def make_activation_quantizer(context: LayerContext) -> ActivationQuantizer | None:
    """Return the quantizer before a matrix of the context's format; ``None`` where its input is not quantized there.

    Activations with the checkpoint's own scales are quantized by the matrix, which has these.
    """
    weight_format = context.weight_format
    if not isinstance(weight_format, Fp8Format) or weight_format.activations == "static":
        return None
    if weight_format.activations == "group":
        return GroupQuantizer()
    return TokenQuantizer(context.activation_scale_ub)
