"""The sampler: chooses each row's next token, greedily or by a draw after temperature, top_k, top_p and min_p.

The filters apply in this order. The parameters stay on the device, by slot. Draws are stateless
(``kernels.gumbel``), and no row is treated differently because of the other rows of its batch.

With tensor parallelism each rank has a shard of the logits. Invariant: given the ranks' logits, every rank gets the
token that one rank would sample from their concatenation, bit for bit. Rows without filters are sampled from the shards
as they are, with one exchange of 8 bytes a row. What the filters drop depends on a whole row, by sums that are taken in
a fixed order, so filtered rows are made whole first: few of them on every rank, more of them divided among the ranks,
so that each rank receives and searches its part of the rows alone.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.kernels.sampling import find_best_keys, sample_tokens, take_tokens
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS, Float32, Int32, SlotOpened

MIN_TEMPERATURE: Final = 1e-5
"""Below this a draw takes the maximum anyway, but its arithmetic would overflow."""
MAX_TOP_K: Final = 1 << 24
"""Larger than any vocabulary, and exact in float32."""
_HALF_RANGE: Final = 1 << 63


class Sampler:
    """Sampling parameters of all slots, the padding slot included, and the draw. A slot without parameters is greedy."""

    def __init__(self, slots: int, device: torch.device, shard: VocabShard | None = None) -> None:
        """``shard`` is this rank's part of the vocabulary; None where one rank has all of it."""
        self._device = device
        self._shard = None if shard is None or shard.group.tp_size == 1 else shard
        self._is_random = np.zeros(slots, dtype=np.bool_)
        self._is_filtered = np.zeros(slots, dtype=np.bool_)
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
        if self._shard is not None:
            self._is_filtered[slots] = _drops_tokens(filters, self._shard.vocab_size)
        self._seeds.index_copy_(0, device_slots, upload(seeds, self._device))
        self._filters.index_copy_(0, device_slots, upload(filters, self._device))

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds int64[slots] and filters float32[slots, 4] of all slots, as ``kernels.sampling`` takes them."""
        return self._seeds, self._filters

    @property
    def is_sharded(self) -> bool:
        """True where this rank has only a shard of the logits."""
        return self._shard is not None

    def needs_whole_rows(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots ``draw`` cannot sample, because they have filters; with one rank, none."""
        return self._is_filtered[slots]

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whole logits [N, vocab] on every rank, from this rank's [N, shard]; with one rank, ``logits`` itself."""
        return logits if self._shard is None else self._shard.gather(logits)

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample tokens int[S] from this rank's logits [S, shard], by the same launches whatever the rows' parameters are.

        The tokens are also written to ``token_table`` int32[slots, n], if it is given. The tokens of rows that need
        whole rows are wrong.
        """
        if self._shard is None:
            return sample_tokens(logits, slots, positions, *self.parameters, token_table=token_table)
        shard = self._shard
        keys = find_best_keys(
            logits,
            slots,
            positions,
            *self.parameters,
            first_token=shard.start,
            vocab_size=shard.vocab_size,
        )
        return take_tokens(shard.group.all_reduce_max(keys), slots, positions, token_table)

    def draw_whole(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sample tokens int[S] as ``draw`` does, but make the rows whole first, so that they may have filters.

        Few rows are gathered on every rank; more of them are divided among the ranks, and their tokens gathered.
        """
        assert self._shard is not None
        count, group = len(logits), self._shard.group
        if count < tuning_for(logits.device).row_exchange_min_rows:
            return sample_tokens(self._shard.gather(logits), slots, positions, *self.parameters)
        own = -(-count // group.tp_size)
        logits, slots, positions = (
            _repeat_last(each, own * group.tp_size) for each in (logits, slots, positions)
        )
        mine = slice(group.tp_rank * own, (group.tp_rank + 1) * own)
        whole = self._shard.exchange_rows(logits)
        tokens = sample_tokens(whole, slots[mine], positions[mine], *self.parameters)
        return group.all_gather(tokens[None].int())[0, :count]

    def sample(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Sample tokens int[S] from this rank's logits [S, shard]; ``NAN_LOGITS`` for rows that contain NaN."""
        if self._shard is None:
            return self.sample_whole(logits, rows)
        is_filtered = self._is_filtered[rows.host_slots]
        if not is_filtered.any():
            return self.draw(logits, rows.slots, rows.positions)
        if is_filtered.all():
            return self.draw_whole(logits, rows.slots, rows.positions)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for selected in (is_filtered, ~is_filtered):
            some = np.flatnonzero(selected)
            indices = upload(some, logits.device)
            tokens[indices] = self.sample(logits[indices], rows.select(some, indices)).long()
        return tokens

    def sample_whole(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Sample tokens int[S] from whole logits [S, vocab]; ``NAN_LOGITS`` for rows that contain NaN."""
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


def _repeat_last(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` rows, of which the last ones repeat the last of ``rows``."""
    spare = count - len(rows)
    return rows if spare == 0 else torch.cat((rows, rows[-1:].expand(spare, *rows.shape[1:])))


def _filters_of(sampling: SamplingSpec) -> list[float]:
    """Return temperature, top_k, top_p and min_p, in the order of the device table; a temperature of 0 means greedy."""
    is_greedy = sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1
    temperature = 0.0 if is_greedy else sampling.temperature
    return [temperature, min(sampling.top_k, MAX_TOP_K), sampling.top_p, sampling.min_p]


def _drops_tokens(filters: Float32, vocab_size: int) -> NDArray[np.bool_]:
    """Return which lines of ``_filters_of`` may drop tokens: those of a draw with top_k, top_p or min_p."""
    temperature, top_k, top_p, min_p = filters.T
    is_limited = (top_k > 0) & (top_k < vocab_size)
    drops: NDArray[np.bool_] = (temperature > 0) & (is_limited | (top_p < 1) | (min_p > 0))
    return drops


def _to_signed(seed: int) -> int:
    """Return the seed's low 64 bits as a signed integer."""
    return (seed + _HALF_RANGE) % (2 * _HALF_RANGE) - _HALF_RANGE
