"""Log-probabilities for who asks: natural logarithms of the softmax of the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skiff_runtime.engine.forward_pass import ForwardPass, HiddenStates
from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.models.footprint import PROMPT_LOGPROBS_CHUNK
from skiff_runtime.step import Int32, SlotOpened, StepPlan

MAX_TOP_LOGPROBS: Final = 20
"""So many likeliest tokens are told at most."""
PART: Final = 64
"""Tokens of a row of which only the likeliest is compared with those of other parts at first."""
_NOTHING: Final = -1
_LAST_ID: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Told:
    """``step.Logprobs`` on the device: float32[N], int32[N, k], float32[N, k]."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePromptLogprobs:
    """``step.PromptLogprobsOutput`` on the device."""

    slot: int
    start: int
    told: Told


class RowLogprobs:
    """Log-probabilities of a step's rows that ask for them, kept from before the logits were edited."""

    def __init__(self, rows: Int32, logprobs: torch.Tensor, top: int) -> None:
        """``logprobs`` float32[N, vocab] are those of ``rows`` int32[N] among the S that were given."""
        self.rows = rows
        self._logprobs = logprobs
        self._top = top

    def of(self, tokens: torch.Tensor) -> Told:
        """Of the tokens int64[S] that were sampled."""
        sampled = tokens[upload(self.rows, tokens.device)].long()
        return tell(self._logprobs, sampled.clamp(min=0), self._top)  # a row without a token reports nothing


class LogprobsGatherer:
    """Which slots ask for what, and the reading of it."""

    def __init__(self, slots: int) -> None:
        self._tops = np.full(slots, _NOTHING, dtype=np.int8)
        self._prompt_tops = np.full(slots, _NOTHING, dtype=np.int8)
        self._prompts = np.zeros(slots, dtype=np.int32)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Take note of what newly taken slots ask for. A prompt with output behind it was told before."""
        for each in opened:
            sampling, fresh = each.sampling, len(each.tokens) == each.prompt_tokens
            self._tops[each.slot] = _capped(sampling.logprobs)
            self._prompt_tops[each.slot] = _capped(sampling.prompt_logprobs) if fresh else _NOTHING
            self._prompts[each.slot] = each.prompt_tokens

    def asking(self, slots: Int32) -> NDArray[np.bool_]:
        """Which of these slots ask for log-probabilities of their output."""
        asking: NDArray[np.bool_] = self._tops[slots] != _NOTHING
        return asking

    def rows(self, logits: torch.Tensor, rows: SampledRows) -> RowLogprobs | None:
        """The log-probabilities of rows that ask, from the model's logits float32 [S, vocab]."""
        tops = self._tops[rows.host_slots]
        asking = np.flatnonzero(tops != _NOTHING)
        if len(asking) == 0:
            return None
        own = logits if len(asking) == len(logits) else logits[upload(asking, logits.device)]
        return RowLogprobs(asking.astype(np.int32), own.log_softmax(-1), int(tops.max()))

    def asked(self, plan: StepPlan) -> Int32:
        """How many positions of each row foretell tokens of a prompt whose log-probabilities are asked for; int32[R]."""
        counts = np.minimum(plan.lengths, self._prompts[plan.slots] - 1 - plan.starts)
        asking = self._prompt_tops[plan.slots] != _NOTHING
        return np.where(asking, counts, 0).clip(min=0).astype(np.int32)

    def prompts(
        self,
        plan: StepPlan,
        asked: Int32,
        hidden: HiddenStates,
        forward_pass: ForwardPass,
        tokens: torch.Tensor,
    ) -> list[DevicePromptLogprobs]:
        """Of the prompt tokens that this step's ``asked`` positions foretell; ``tokens`` is the table of known tokens."""
        chunks = []
        offsets = np.cumsum(plan.lengths) - plan.lengths
        for row in np.flatnonzero(asked):
            slot, start, offset = int(plan.slots[row]), int(plan.starts[row]), int(offsets[row])
            following = tokens[slot, start + 1 : start + 1 + int(asked[row])].long()
            told = _slices(forward_pass, hidden, offset, following, int(self._prompt_tops[slot]))
            chunks.append(DevicePromptLogprobs(slot, start + 1, told))
        return chunks


def _slices(
    forward_pass: ForwardPass, hidden: HiddenStates, offset: int, following: torch.Tensor, top: int
) -> Told:
    """At ``offset`` and on among the step's tokens, of the tokens int64[N] that follow there."""
    parts = []
    for at in range(0, len(following), PROMPT_LOGPROBS_CHUNK):
        chosen = following[at : at + PROMPT_LOGPROBS_CHUNK]
        logits = forward_pass.logits(hidden.at(slice(offset + at, offset + at + len(chosen)))).float()
        parts.append(tell(logits.log_softmax(-1), chosen, top))
    return Told(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top for part in parts]),
    )


def tell(logprobs: torch.Tensor, tokens: torch.Tensor, top: int) -> Told:
    """Of ``tokens`` int64[N] and of the ``top`` likeliest, from log-probabilities float32 [N, vocab].

    Of equally likely tokens the lower id comes first, as it does where the greedy token is chosen.
    """
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if top == 0:
        nothing = chosen.new_empty((len(tokens), 0))
        return Told(chosen, nothing.int(), nothing)
    ids = likeliest(logprobs, min(top, logprobs.shape[1]))
    return Told(chosen, ids.int(), logprobs.gather(1, ids))


def likeliest(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Ids int64[N, count] of the largest of float32 [N, vocab], by value and then by id.

    As ids of a part follow each other, all are in the ``count`` parts whose own first tokens come first in that order; so few are
    compared by both.
    """
    rows, vocab = logprobs.shape
    spare = -vocab % PART
    padded = F.pad(logprobs, (0, spare), value=-torch.inf) if spare else logprobs
    parts = padded.reshape(rows, (vocab + spare) // PART, PART)
    order, within = (torch.arange(size, device=logprobs.device) for size in parts.shape[1:])
    first = _first(parts.amax(2), order, min(count, len(order)))[:, :, None]
    near = parts.gather(1, first.expand(-1, -1, PART))
    return _first(near.flatten(1), (first * PART + within).flatten(1), count)


def _first(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Of ``ids`` int64[N, M] or [M] those int64[N, count] that come first by their values float32 [N, M] and then by themselves.

    ``topk`` alone keeps any of those that are equal. So it sees keys: a float's bits in an order of whole numbers (of the two
    zeros only one), and below them the id.
    """
    bits = (values + 0.0).view(torch.int32)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (_LAST_ID - ids)
    return _LAST_ID - (keys.topk(count).values & _LAST_ID)


def _capped(asked: int | None) -> int:
    return _NOTHING if asked is None else min(asked, MAX_TOP_LOGPROBS)
