"""Logits processors: what requests change in their logits before a token is sampled (bias, penalties, ``min_tokens``).

Penalties keep no counts: they read the texts themselves from the table of tokens, where every token stands as soon as
it is sampled. So neither a step in flight nor a preemption can make them wrong, and rows without penalties cost
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.kernels.penalties import apply_penalties
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import Float32, Int32, SlotOpened

MASKED_LOGIT: Final = -1e30
"""Logit of an end token before ``min_tokens``: below all others, yet finite, so a grammar can still force the token."""

RowIndices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _LogitBias:
    """Values that are added to the logits of some tokens."""

    tokens: RowIndices
    values: Float32


@dataclass(frozen=True, slots=True)
class _MinTokens:
    """Tokens that would end the answer, masked before position ``until``."""

    tokens: RowIndices
    until: int


class LogitsProcessors:
    """The logits processors of every slot's request."""

    def __init__(self, token_table: torch.Tensor, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``token_table`` int32[slots, length] holds every slot's known tokens."""
        slots, device = token_table.shape[0], token_table.device
        self._token_table = token_table
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._has_processor = np.zeros(slots, dtype=np.bool_)
        self._has_penalty = np.zeros(slots, dtype=np.bool_)
        self._biases: dict[int, _LogitBias] = {}
        self._min_tokens: dict[int, _MinTokens] = {}
        self._prompt_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._penalties = torch.zeros((slots, 3), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Register the processors of newly opened slots."""
        for each in opened:
            slot, sampling = each.slot, each.sampling
            self._biases.pop(slot, None)
            self._min_tokens.pop(slot, None)
            if sampling.logit_bias:
                self._biases[slot] = self._make_bias(sampling)
            if sampling.min_tokens:
                self._min_tokens[slot] = self._make_min_tokens(each)
            penalties = (
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            self._has_penalty[slot] = penalties != (1.0, 0.0, 0.0)
            if self._has_penalty[slot]:
                self._prompt_tokens[slot] = each.prompt_tokens
                self._penalties[slot] = upload(np.array(penalties, np.float32), self._penalties.device)
            self._has_processor[slot] = (
                self._has_penalty[slot] or slot in self._biases or slot in self._min_tokens
            )

    def applies_to(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots have a logits processor."""
        return self._has_processor[slots]

    def apply(self, logits: torch.Tensor, rows: SampledRows) -> None:
        """Process logits float32[S, vocab] in place: bias, then penalties, then ``min_tokens``."""
        processed = np.flatnonzero(self._has_processor[rows.host_slots])
        if len(processed) == 0:
            return
        self._add_biases(logits, rows, processed)
        penalized = processed[self._has_penalty[rows.host_slots[processed]]]
        if len(penalized):
            self._apply_penalties(logits, rows, penalized)
        self._mask_end_tokens(logits, rows, processed)

    def _add_biases(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        biased = [(row, bias) for row in processed if (bias := self._biases.get(int(rows.host_slots[row])))]
        if biased:
            values = np.concatenate([bias.values for _, bias in biased])
            cells = _cells([(row, bias.tokens) for row, bias in biased], logits.device)
            logits[cells] += upload(values, logits.device)

    def _mask_end_tokens(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        masked = []
        for row in processed:
            min_tokens = self._min_tokens.get(int(rows.host_slots[row]))
            if min_tokens is not None and rows.host_positions[row] < min_tokens.until:
                masked.append((row, min_tokens.tokens))
        if masked:
            logits[_cells(masked, logits.device)] = MASKED_LOGIT

    def _apply_penalties(self, logits: torch.Tensor, rows: SampledRows, penalized: RowIndices) -> None:
        indices = upload(penalized, logits.device)
        apply_penalties(
            *(logits, indices, rows.slots[indices], rows.positions[indices]),
            *(self._token_table, self._prompt_tokens, self._penalties),
            max_len=int(rows.host_positions[penalized].max()),
        )

    def _make_bias(self, sampling: SamplingSpec) -> _LogitBias:
        """Drop ids outside of the vocabulary; of an id that occurs twice, keep the last value."""
        values = {token: value for token, value in sampling.logit_bias if 0 <= token < self._vocab_size}
        return _LogitBias(np.array(list(values), np.int64), np.array(list(values.values()), np.float32))

    def _make_min_tokens(self, opened: SlotOpened) -> _MinTokens:
        ends = sorted({*self._eos_token_ids, *opened.sampling.stop_token_ids})
        tokens = np.array([token for token in ends if 0 <= token < self._vocab_size], np.int64)
        return _MinTokens(tokens, opened.prompt_tokens + opened.sampling.min_tokens)


def _cells(
    tokens_by_row: Sequence[tuple[int, RowIndices]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) of every logit to change, int64[N] each, by one upload."""
    rows = np.repeat([row for row, _ in tokens_by_row], [len(tokens) for _, tokens in tokens_by_row])
    packed = np.stack([rows, np.concatenate([tokens for _, tokens in tokens_by_row])])
    row_indices, token_ids = upload(packed, device).unbind()
    return row_indices, token_ids
