"""Eight-bit floating point (e4m3: 4 bits of exponent, 3 of fraction; Micikevicius et al., 2022), on any device.

A matrix is kept with one scale for each output, activations are rounded with one scale for each token, and their
product is scaled back by both. A CPU has no such product, and that of a GPU is in bfloat16: on the one, and for models
in float32 on the other, the rounded numbers are multiplied in float32.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.norm import add_rms_norm

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest finite number of e4m3."""
SMALLEST_SCALE: Final = 1e-12
"""Of rows that are all zero, or nearly."""
ALIGNMENT: Final = 16
"""A GPU multiplies matrices whose inputs and outputs are multiples of it."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Activations [T, n] as e4m3 ``values`` times ``scales`` float32 [T, 1]; products of them are in ``dtype``.

    On a GPU the values of a single token are in ``dtype``, too, though rounded all the same: what multiplies them there
    would only have to widen them again.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | Rounded


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers; beyond the largest, the largest (torch's own conversion makes those NaN)."""
    return values.float().clamp_(-LARGEST, LARGEST).to(E4M3)


def round_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, n] -> e4m3 [N, n], and float32 [N, 1] by which each row is to be multiplied: its largest becomes 448.

    In plain torch, which any thread may call.
    """
    wide = values.float()
    largest = torch.full(
        (1, 1), LARGEST, device=values.device
    )  # a division by a plain number is rounded otherwise
    scales = (wide.abs().amax(1, keepdim=True) / largest).clamp_(min=SMALLEST_SCALE)
    return to_e4m3(wide * scales.reciprocal()), scales


def round_activations(x: torch.Tensor) -> Rounded:
    """x [T, n], rounded."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.fused import fp8

        return fp8.round_activations(x)
    return Rounded(*round_rows(x), x.dtype)


def add_norm_and_round(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[Rounded, torch.Tensor]:
    """(``rms_norm`` of the sum, rounded; the sum) of x and residual, both [T, n]."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.fused import fp8

        return fp8.add_norm_and_round(x, residual, weight, eps)
    normed, total = add_rms_norm(x, residual, weight, eps)
    return round_activations(normed), total


def silu_mul_and_round(gate_up: torch.Tensor) -> Rounded:
    """[T, 2n] -> [T, n]: silu of the first half times the second, rounded."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.fused import fp8

        return fp8.silu_mul_and_round(gate_up)
    return round_activations(silu_and_mul(gate_up))


def scaled_linear(
    x: Activations, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, inputs] times e4m3 ``weight`` [outputs, inputs] with ``scales`` float32 [outputs, 1]; [T, outputs]."""
    rounded = x if isinstance(x, Rounded) else round_activations(x)
    if weight.device.type == "cuda" and rounded.dtype != torch.float32:
        return _on_tensor_cores(rounded, weight, scales, bias)
    product = F.linear(rounded.values.float(), weight.float()) * rounded.scales * scales.T
    return (product if bias is None else product + bias.float()).to(rounded.dtype)


def _on_tensor_cores(
    x: Rounded, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from skiff_runtime.kernels.fused import gemv

    if gemv.pays(x.values, weight):
        return gemv.gemv(x.values, weight, bias, scales=(x.scales, scales), dtype=x.dtype)
    product: torch.Tensor = torch._scaled_mm(
        x.values.to(E4M3),
        weight.T,
        scale_a=x.scales,
        scale_b=scales.T,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    product = product.to(x.dtype)
    return product if bias is None else product + bias
