"""Eight-bit floating point (e4m3: 4 bits of exponent, 3 of fraction; Micikevicius et al., 2022), on any device.

A matrix is kept with one scale for each output, activations are rounded with one scale for each token, and their
product is scaled back by both. A CPU has no such product: there, the rounded numbers are multiplied in float32.
"""

from typing import Final

import torch
import torch.nn.functional as F

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest finite number of e4m3."""
SMALLEST_SCALE: Final = 1e-12
"""Of rows that are all zero, or nearly."""
ALIGNMENT: Final = 16
"""A GPU multiplies matrices whose inputs and outputs are multiples of it."""


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers; beyond the largest, the largest (torch's own conversion makes those NaN)."""
    return values.float().clamp_(-LARGEST, LARGEST).to(E4M3)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, n] -> e4m3 [N, n], and float32 [N, 1] by which each row is to be multiplied: its largest becomes 448."""
    if values.device.type == "cuda":
        from skiff_runtime.kernels.fused import fp8

        return fp8.quantize_rows(values)
    return round_rows(values)


def round_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_rows`` in plain torch, which any thread may call."""
    wide = values.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    return to_e4m3(wide / scales), scales


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, inputs] times e4m3 ``weight`` [outputs, inputs] with ``scales`` float32 [outputs, 1]; [T, outputs] as x."""
    if x.device.type == "cuda":
        return _on_tensor_cores(x, weight, scales, bias)
    rounded, row_scales = quantize_rows(x)
    product = F.linear(rounded.float(), weight.float()) * row_scales * scales.T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _on_tensor_cores(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from skiff_runtime.kernels.fused import gemv

    if gemv.pays(x, weight):
        return gemv.gemv(x, weight, scales, bias)
    rounded, row_scales = quantize_rows(x)
    product: torch.Tensor = torch._scaled_mm(
        rounded,
        weight.T,
        scale_a=row_scales,
        scale_b=scales.T,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    product = product.to(x.dtype)
    return product if bias is None else product + bias
