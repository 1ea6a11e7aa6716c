"""The sampler: chooses each row's next token, greedily or by a draw after temperature, top_k, top_p and min_p.

The filters apply in this order. The parameters stay on the device, by slot. Draws are stateless
(``kernels.gumbel``), and no row is treated differently because of the other rows of its batch.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.kernels.sampling import sample_tokens
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS, SlotOpened

MIN_TEMPERATURE: Final = 1e-5
"""Below this a draw takes the maximum anyway, but its arithmetic would overflow."""
MAX_TOP_K: Final = 1 << 24
"""Larger than any vocabulary, and exact in float32."""
_HALF_RANGE: Final = 1 << 63


class Sampler:
    """Sampling parameters of all slots, the padding slot included, and the draw. A slot without parameters is greedy."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._is_random = np.zeros(slots, dtype=np.bool_)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._filters = torch.zeros((slots, 4), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Set the parameters of newly opened slots."""
        if not opened:
            return
        slots = np.array([each.slot for each in opened], dtype=np.int64)
        device_slots = upload(slots, self._device)
        seeds = np.array([_to_signed(each.sampling.seed) for each in opened], dtype=np.int64)
        filters = np.array([_filters_of(each.sampling) for each in opened], dtype=np.float32)
        self._is_random[slots] = filters[:, 0] > 0
        self._seeds.index_copy_(0, device_slots, upload(seeds, self._device))
        self._filters.index_copy_(0, device_slots, upload(filters, self._device))

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds int64[slots] and filters float32[slots, 4] of all slots, as ``kernels.sampling`` takes them."""
        return self._seeds, self._filters

    def sample(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Sample tokens int[S] from logits [S, vocab]; ``NAN_LOGITS`` for rows that contain NaN."""
        is_random = self._is_random[rows.host_slots]
        if logits.device.type == "cuda" or is_random.all():
            return self._sample(logits, rows)
        # On a CPU a maximum is much cheaper than a draw, so greedy rows take it.
        largest, tokens = logits.max(-1)
        tokens.masked_fill_(largest.isnan(), NAN_LOGITS)
        random = np.flatnonzero(is_random)
        if len(random):
            indices = torch.from_numpy(random)
            tokens[indices] = self._sample(logits[indices], rows.select(random, indices))
        return tokens

    def _sample(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        return sample_tokens(logits, rows.slots, rows.positions, *self.parameters)


def _filters_of(sampling: SamplingSpec) -> list[float]:
    """Return temperature, top_k, top_p and min_p, in the order of the device table; a temperature of 0 means greedy."""
    is_greedy = sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1
    temperature = 0.0 if is_greedy else sampling.temperature
    return [temperature, min(sampling.top_k, MAX_TOP_K), sampling.top_p, sampling.min_p]


def _to_signed(seed: int) -> int:
    """Return the seed's low 64 bits as a signed integer."""
    return (seed + _HALF_RANGE) % (2 * _HALF_RANGE) - _HALF_RANGE
