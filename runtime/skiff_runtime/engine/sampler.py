"""Chooses each row's next token: greedy, or a draw after temperature, top_k, top_p and min_p in this order.

Parameters live on the device by slot. Draws are stateless (see ``kernels.gumbel``), and a row
is never treated differently because of the other rows of its batch.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.kernels.sampling import choose
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS, SlotOpened

MIN_TEMPERATURE: Final = 1e-5
"""Below it a draw takes the maximum anyway, but its arithmetic would overflow."""
MAX_TOP_K: Final = 1 << 24
"""More than any vocabulary has, and exact in float32."""
_HALF: Final = 1 << 63


class Sampler:
    """Sampling parameters of all slots, nobody's among them, and the draw. Who has set none is greedy."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._draws = np.zeros(slots, dtype=np.bool_)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._filters = torch.zeros((slots, 4), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Set the parameters of newly taken slots."""
        if not opened:
            return
        slots = np.array([each.slot for each in opened], dtype=np.int64)
        where = upload(slots, self._device)
        seeds = np.array([_signed(each.sampling.seed) for each in opened], dtype=np.int64)
        filters = np.array([_row(each.sampling) for each in opened], dtype=np.float32)
        self._draws[slots] = filters[:, 0] > 0
        self._seeds.index_copy_(0, where, upload(seeds, self._device))
        self._filters.index_copy_(0, where, upload(filters, self._device))

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds and filters of all slots, as ``kernels.sampling`` takes them."""
        return self._seeds, self._filters

    def sample(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Sample tokens int[S] from logits [S, vocab]; ``NAN_LOGITS`` for rows that contain NaN."""
        draws = self._draws[rows.host_slots]
        if logits.device.type == "cuda" or draws.all():
            return self._choose(logits, rows)
        largest, tokens = logits.max(-1)
        tokens.masked_fill_(largest.isnan(), NAN_LOGITS)
        drawn = np.flatnonzero(draws)
        if len(drawn):
            where = torch.from_numpy(drawn)
            tokens[where] = self._choose(logits[where], rows.take(drawn, where))
        return tokens

    def _choose(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        return choose(logits, rows.slots, rows.positions, *self.parameters)


def _row(sampling: SamplingSpec) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p, min_p; a temperature of 0 stands for greedy."""
    greedy = sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1
    return (
        0.0 if greedy else sampling.temperature,
        min(sampling.top_k, MAX_TOP_K),
        sampling.top_p,
        sampling.min_p,
    )


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed number."""
    return (seed + _HALF) % (2 * _HALF) - _HALF
