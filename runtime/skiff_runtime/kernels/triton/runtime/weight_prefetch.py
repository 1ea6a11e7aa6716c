"""Prefetch of a weight into the L2 cache by programs of a kernel that leaves the memory idle."""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import CACHE_LINE_BYTES, prefetch

ROUND_LINES: Final = 512
"""Cache lines that a program prefetches at a time."""
_LINE_BYTES: Final = 128
_ROUND_LINES = tl.constexpr(ROUND_LINES)


@dataclass(frozen=True, slots=True)
class WeightPrefetch:
    """A share of a weight: ``programs`` programs prefetch ``rounds`` times ``ROUND_LINES`` cache lines each.

    They take every ``stride``-th row of the weight, from the first one on.
    """

    weight: torch.Tensor
    programs: int
    rounds: int
    stride: int

    def options(self) -> dict[str, int]:
        """Return the constexprs of ``prefetch_weight``."""
        row_lines = self.weight.shape[1] * self.weight.itemsize // _LINE_BYTES
        return {"ROW_LINES": row_lines, "STRIDE": self.stride, "ROUNDS": self.rounds}


def plan_prefetch(
    weight: torch.Tensor | None, otherwise: torch.Tensor, *, nbytes: int, programs: int, stride: int
) -> WeightPrefetch:
    """Return a plan for at most ``nbytes`` bytes of ``weight`` [outputs, inputs], in rows that are ``stride`` apart.

    It has no programs if there is no weight, if its rows are no whole cache lines, or if they are fewer than one round;
    ``otherwise`` takes the weight's place there, in a launch that reads nothing of it.
    """
    if weight is not None and weight.is_contiguous() and weight.shape[1] * weight.itemsize % _LINE_BYTES == 0:
        row_bytes = weight.shape[1] * weight.itemsize
        nbytes = min(nbytes, weight.shape[0] // stride * row_bytes)
        rounds = nbytes // (programs * ROUND_LINES * _LINE_BYTES)
        if rounds > 0:
            return WeightPrefetch(weight, programs, rounds, stride)
    return WeightPrefetch(otherwise, 0, 0, stride)


@triton.jit
def prefetch_weight(
    weight: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    ROW_LINES: tl.constexpr,
    STRIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefetch the share of one of ``programs`` programs; all together go through the rows in order."""
    for each in range(ROUNDS):
        line = (each * programs + program) * _ROUND_LINES + tl.arange(0, _ROUND_LINES)
        row = (line // ROW_LINES).to(tl.int64)
        prefetch(
            weight.to(tl.int64) + (row * (STRIDE * ROW_LINES) + line % ROW_LINES) * CACHE_LINE_BYTES, PDL
        )
