"""Numbers in eight bits (e4m3: 4 bits of exponent, 3 of fraction; Micikevicius et al., 2022), with a scale for each row."""

import math
from dataclasses import dataclass
from typing import Final

import torch

E4M3: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest finite number of e4m3."""
FP16_DOWNSCALE: Final = 256.0
"""A power of two: of the products of two e4m3 numbers, so many times smaller, float16 holds the sum of 80."""
MIN_SCALE: Final = 1e-12
"""Of rows that are all zero, or nearly."""


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations [T, n] as e4m3 ``values`` times ``scales`` float32 [T, 1]; products of them are in ``dtype``.

    On a GPU the values of a single token are in float16, though rounded all the same: what multiplies them there would
    only have to widen them again. They are ``FP16_DOWNSCALE`` times smaller, and their scale larger, lest sums overflow.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Matrix:
    """A layer's e4m3 ``values`` [outputs, inputs] times ``scales`` float32 [outputs, 1].

    ``arrivals`` int32[outputs], all zero, is what the programs of one product count themselves by; so it is one at a time.
    """

    values: torch.Tensor
    scales: torch.Tensor
    arrivals: torch.Tensor


def empty_fp8_weight(outputs: int, inputs: int, device: torch.device) -> Matrix:
    """Values and scales are yet to be filled."""
    return Matrix(
        values=torch.empty((outputs, inputs), dtype=E4M3, device=device),
        scales=torch.empty((outputs, 1), dtype=torch.float32, device=device),
        arrivals=torch.zeros(outputs, dtype=torch.int32, device=device),
    )


def cast_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers; beyond the largest, the largest (torch's own conversion makes those NaN)."""
    return values.float().clamp_(-FP8_MAX, FP8_MAX).to(E4M3)


def quantize_rows(values: torch.Tensor, bound: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, n] -> e4m3 [N, n], and float32 [N, 1] by which each row is to be multiplied: its largest becomes 448.

    So does ``bound``, where the largest is beyond it, and all that is beyond it, too. In plain torch, which any thread
    may call.
    """
    wide = values.float()
    largest = torch.full(
        (1, 1), FP8_MAX, device=values.device
    )  # a division by a plain number is rounded otherwise
    reached = wide.abs().amax(1, keepdim=True).clamp_(max=bound)
    scales = (reached / largest).clamp_(min=MIN_SCALE)
    return cast_to_fp8(wide * scales.reciprocal()), scales
