"""What requests ask to be done to their logits before a token is chosen: bias, penalties, a least length.

Penalties keep no counts: they read the texts themselves from the table of tokens, where every token stands as soon
as it is sampled. So neither a step in flight nor a preemption can make them wrong, and who asks for none pays nothing.
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
"""A banned token's logit: below all others, yet finite, so that a grammar that admits nothing else prevails."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Bias:
    """What is added to the logits of some tokens."""

    tokens: Rows
    values: Float32


@dataclass(frozen=True, slots=True)
class _Ban:
    """Tokens that may not stand before a position."""

    tokens: Rows
    until: int


class LogitsProcessors:
    """The edits that each slot's request asks for."""

    def __init__(self, tokens: torch.Tensor, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokens`` int32[slots, length]: the table of every slot's known tokens."""
        slots, device = tokens.shape[0], tokens.device
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._edited = np.zeros(slots, dtype=np.bool_)
        self._penalized = np.zeros(slots, dtype=np.bool_)
        self._biases: dict[int, _Bias] = {}
        self._bans: dict[int, _Ban] = {}
        self._prompts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._penalties = torch.zeros((slots, 3), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Take note of what newly taken slots ask for."""
        for each in opened:
            slot, sampling = each.slot, each.sampling
            self._biases.pop(slot, None)
            self._bans.pop(slot, None)
            if sampling.logit_bias:
                self._biases[slot] = self._bias(sampling)
            if sampling.min_tokens:
                self._bans[slot] = self._ban(each)
            penalties = (
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            self._penalized[slot] = penalties != (1.0, 0.0, 0.0)
            if self._penalized[slot]:
                self._prompts[slot] = each.prompt_tokens
                self._penalties[slot] = upload(np.array(penalties, np.float32), self._penalties.device)
            self._edited[slot] = self._penalized[slot] or slot in self._biases or slot in self._bans

    def asking(self, slots: Int32) -> NDArray[np.bool_]:
        """Which of these slots ask for an edit."""
        return self._edited[slots]

    def apply(self, logits: torch.Tensor, rows: SampledRows) -> None:
        """Edit logits float32 [S, vocab] in place: bias, then penalties, then bans; other rows are not touched."""
        edited = np.flatnonzero(self._edited[rows.host_slots])
        if len(edited) == 0:
            return
        self._add_biases(logits, rows, edited)
        penalized = edited[self._penalized[rows.host_slots[edited]]]
        if len(penalized):
            self._penalize(logits, rows, penalized)
        self._set_bans(logits, rows, edited)

    def _add_biases(self, logits: torch.Tensor, rows: SampledRows, edited: Rows) -> None:
        found = [(row, bias) for row in edited if (bias := self._biases.get(int(rows.host_slots[row])))]
        if found:
            values = np.concatenate([bias.values for _, bias in found])
            cells = _cells([(row, bias.tokens) for row, bias in found], logits.device)
            logits[cells] += upload(values, logits.device)

    def _set_bans(self, logits: torch.Tensor, rows: SampledRows, edited: Rows) -> None:
        found = []
        for row in edited:
            ban = self._bans.get(int(rows.host_slots[row]))
            if ban is not None and rows.host_positions[row] < ban.until:
                found.append((row, ban.tokens))
        if found:
            logits[_cells(found, logits.device)] = MASKED_LOGIT

    def _penalize(self, logits: torch.Tensor, rows: SampledRows, penalized: Rows) -> None:
        where = upload(penalized, logits.device)
        apply_penalties(
            *(logits, where, rows.slots[where], rows.positions[where]),
            *(self._tokens, self._prompts, self._penalties),
            longest=int(rows.host_positions[penalized].max()),
        )

    def _bias(self, sampling: SamplingSpec) -> _Bias:
        """Ids outside the vocabulary mean no token; of an id named twice, the last value counts."""
        values = {token: value for token, value in sampling.logit_bias if 0 <= token < self._vocab_size}
        return _Bias(np.array(list(values), np.int64), np.array(list(values.values()), np.float32))

    def _ban(self, opened: SlotOpened) -> _Ban:
        ends = sorted({*self._eos, *opened.sampling.stop_token_ids})
        tokens = np.array([token for token in ends if 0 <= token < self._vocab_size], np.int64)
        return _Ban(tokens, opened.prompt_tokens + opened.sampling.min_tokens)


def _cells(found: Sequence[tuple[int, Rows]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens int64[N] of all that was found."""
    rows = np.repeat([row for row, _ in found], [len(tokens) for _, tokens in found])
    packed = np.stack([rows, np.concatenate([tokens for _, tokens in found])])
    places, tokens = upload(packed, device).unbind()
    return places, tokens
