"""FP8 weights and activations with their scales (e4m3: 3 bits of mantissa; Micikevicius et al., 2022)."""

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.constants import FP8_BLOCK

E4M3: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest finite FP8 number."""
FP16_DOWNSCALE: Final = 256.0
"""The divisor of FP8 activations that are kept in float16: a power of two, so that no bit is lost, and large enough
that float16 holds the sum of 80 products with FP8 weights."""
MIN_SCALE: Final = 1e-12
"""The scale of rows that are zero, or nearly."""


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations [T, n]: FP8 ``values`` times ``scales`` float32 [T, 1]; products of them are of type ``dtype``.

    For block FP8 the scales are [T, groups of 128], and the tokens of one group lie beside each other.

    On a GPU the values of a single token are float16, though rounded to FP8 numbers, divided by ``FP16_DOWNSCALE``,
    and their scale is multiplied by it: the kernel that multiplies them would only have to convert them back.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.values)

    def select_rows(self, rows: slice) -> "QuantizedActivations":
        """Return the activations of some of the tokens, in the same memory; not for block FP8."""
        return QuantizedActivations(self.values[rows], self.scales[rows], self.dtype)


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """A layer's weight: FP8 ``values`` [outputs, inputs] times ``scales`` float32 [outputs, 1].

    ``tile_counters`` int32 [outputs], all zero, belong to the product in flight (``stream_k_gemm``), so a weight can
    have one at a time.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tile_counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockFP8Weight:
    """A layer's weight: FP8 ``values`` [outputs, inputs] times a float32 scale for each block of 128 x 128.

    ``scales`` [blocks of outputs, blocks of inputs, padded to a multiple of 4 with zeros]; ``tile_counters`` as in
    ``FP8Weight``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tile_counters: torch.Tensor


def empty_fp8_weight(outputs: int, inputs: int, device: torch.device) -> FP8Weight:
    """Allocate a weight whose values and scales are yet to be filled."""
    return FP8Weight(
        values=torch.empty((outputs, inputs), dtype=E4M3, device=device),
        scales=torch.empty((outputs, 1), dtype=torch.float32, device=device),
        tile_counters=torch.zeros(outputs, dtype=torch.int32, device=device),
    )


def cast_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest FP8 numbers and saturate, where torch's own conversion makes NaN."""
    return values.float().clamp_(-FP8_MAX, FP8_MAX).to(E4M3)


def quantize_rows(values: torch.Tensor, bound: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [N, n] to (FP8 [N, n], scales float32 [N, 1]), such that the largest magnitude of each row becomes 448.

    Magnitudes beyond ``bound`` become the bound. In plain torch, which any thread may call.
    """
    wide = values.float()
    # As a tensor, because a division by a Python number is rounded differently.
    fp8_max = torch.full((1, 1), FP8_MAX, device=values.device)
    amax = wide.abs().amax(1, keepdim=True).clamp_(max=bound)
    scales = (amax / fp8_max).clamp_(min=MIN_SCALE)
    return cast_to_fp8(wide * scales.reciprocal()), scales


def quantize_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [N, n] to (FP8 [N, n], scales float32 [N, groups]), each 128 elements of a row like ``quantize_rows``."""
    rows, width = values.shape
    padded = F.pad(values.float(), (0, -width % FP8_BLOCK))
    quantized, scales = quantize_rows(padded.view(-1, FP8_BLOCK))
    return quantized.view(padded.shape)[:, :width].contiguous(), scales.view(rows, -1)
