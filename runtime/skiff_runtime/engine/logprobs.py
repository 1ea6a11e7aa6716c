"""Log-probabilities of sampled and of prompt tokens: natural logarithms of the softmax of the model's own logits."""

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
"""Bound of the most likely tokens that are reported per position."""
BLOCK_TOKENS: Final = 64
"""Tokens of a block; ``top_token_ids`` compares only the largest value of each block first."""
_NOT_REQUESTED: Final = -1
_MAX_ID: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """``step.LogprobsOutput`` on the device: float32[N], int32[N, k], float32[N, k], and int32[N] or None."""

    token_logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    token_ranks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DevicePromptLogprobs:
    """``step.PromptLogprobsOutput`` on the device."""

    slot: int
    start: int
    logprobs: DeviceLogprobs


class RowLogprobs:
    """Log-probabilities of the rows that request them, computed before their logits are processed."""

    def __init__(self, rows: Int32, logprobs: torch.Tensor, top: int) -> None:
        """``logprobs`` float32[N, vocab] are those of ``rows`` int32[N], indices among the step's S rows."""
        self.rows = rows
        self._logprobs = logprobs
        self._top = top

    def gather(self, tokens: torch.Tensor) -> DeviceLogprobs:
        """Return those of the tokens int64[S] that were sampled."""
        sampled = tokens[upload(self.rows, tokens.device)].long()
        # A row without a token (NaN) is negative here; its request ends, and its log-probability is not reported.
        return gather_logprobs(self._logprobs, sampled.clamp(min=0), self._top)


class LogprobsGatherer:
    """Keeps the log-probabilities that each slot requests, and computes them."""

    def __init__(self, slots: int) -> None:
        self._tops = np.full(slots, _NOT_REQUESTED, dtype=np.int8)
        self._prompt_tops = np.full(slots, _NOT_REQUESTED, dtype=np.int8)
        self._prompt_tokens = np.zeros(slots, dtype=np.int32)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Register newly opened slots.

        A prompt with output behind it comes back from a preemption: its log-probabilities were reported before.
        """
        for each in opened:
            sampling, is_new = each.sampling, len(each.tokens) == each.prompt_tokens
            self._tops[each.slot] = _capped(sampling.logprobs)
            self._prompt_tops[each.slot] = _capped(sampling.prompt_logprobs) if is_new else _NOT_REQUESTED
            self._prompt_tokens[each.slot] = each.prompt_tokens

    def applies_to(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots request log-probabilities of their output."""
        applies: NDArray[np.bool_] = self._tops[slots] != _NOT_REQUESTED
        return applies

    def compute_rows(self, logits: torch.Tensor, rows: SampledRows) -> RowLogprobs | None:
        """Compute the log-probabilities of the rows that request them, from the model's logits float32[S, vocab]."""
        tops = self._tops[rows.host_slots]
        requesting = np.flatnonzero(tops != _NOT_REQUESTED)
        if len(requesting) == 0:
            return None
        own = logits if len(requesting) == len(logits) else logits[upload(requesting, logits.device)]
        return RowLogprobs(requesting.astype(np.int32), own.log_softmax(-1), int(tops.max()))

    def count_prompt_positions(self, plan: StepPlan) -> Int32:
        """Count, for each row, the positions whose next token is a prompt token with requested logprobs; int32[R]."""
        counts = np.minimum(plan.lengths, self._prompt_tokens[plan.slots] - 1 - plan.starts)
        requesting = self._prompt_tops[plan.slots] != _NOT_REQUESTED
        return np.where(requesting, counts, 0).clip(min=0).astype(np.int32)

    def compute_prompts(
        self,
        plan: StepPlan,
        counts: Int32,
        hidden: HiddenStates,
        forward_pass: ForwardPass,
        token_table: torch.Tensor,
    ) -> list[DevicePromptLogprobs]:
        """Compute the log-probabilities of prompt tokens, from the hidden states of all of the step's tokens.

        ``counts`` int32[R] are those of ``count_prompt_positions``; ``token_table`` holds every slot's known tokens.
        """
        chunks = []
        offsets = np.cumsum(plan.lengths) - plan.lengths
        for row in np.flatnonzero(counts):
            slot, start, offset = int(plan.slots[row]), int(plan.starts[row]), int(offsets[row])
            next_tokens = token_table[slot, start + 1 : start + 1 + int(counts[row])].long()
            logprobs = _compute_in_chunks(
                forward_pass, hidden, offset, next_tokens, int(self._prompt_tops[slot])
            )
            chunks.append(DevicePromptLogprobs(slot, start + 1, logprobs))
        return chunks


def _compute_in_chunks(
    forward_pass: ForwardPass, hidden: HiddenStates, offset: int, next_tokens: torch.Tensor, top: int
) -> DeviceLogprobs:
    """Compute the log-probabilities of ``next_tokens`` int64[N], which follow the step's tokens at ``offset`` and on.

    In chunks of positions, because the logits of a whole prompt would take gigabytes.
    """
    parts, ranks = [], []
    for at in range(0, len(next_tokens), PROMPT_LOGPROBS_CHUNK):
        chunk = next_tokens[at : at + PROMPT_LOGPROBS_CHUNK]
        own = hidden.select(slice(offset + at, offset + at + len(chunk)))
        logprobs = forward_pass.whole_logits(own).float().log_softmax(-1)
        part = gather_logprobs(logprobs, chunk, top)
        parts.append(part)
        ranks.append((logprobs >= part.token_logprobs[:, None]).sum(1, dtype=torch.int32))
    return DeviceLogprobs(
        torch.cat([part.token_logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
        torch.cat(ranks),
    )


def gather_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, top: int) -> DeviceLogprobs:
    """Gather those of ``tokens`` int64[N] and of the ``top`` most likely tokens from float32[N, vocab].

    Of equally likely tokens the lower id comes first, as it does where the greedy token is chosen.
    """
    token_logprobs = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if top == 0:
        nothing = token_logprobs.new_empty((len(tokens), 0))
        return DeviceLogprobs(token_logprobs, nothing.int(), nothing)
    ids = top_token_ids(logprobs, min(top, logprobs.shape[1]))
    return DeviceLogprobs(token_logprobs, ids.int(), logprobs.gather(1, ids))


def top_token_ids(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids int64[N, count] of the largest of float32[N, vocab], ordered by value, then by id.

    The vocabulary is cut into blocks of consecutive ids. The ``count`` largest values lie in the ``count`` blocks whose
    own maxima come first in the same order (ties by the block's index, which orders ids alike), so only these blocks'
    tokens are compared by value and id.
    """
    rows, vocab = logprobs.shape
    spare = -vocab % BLOCK_TOKENS
    padded = F.pad(logprobs, (0, spare), value=-torch.inf) if spare else logprobs
    blocks = padded.reshape(rows, (vocab + spare) // BLOCK_TOKENS, BLOCK_TOKENS)
    block_ids, offsets = (torch.arange(size, device=logprobs.device) for size in blocks.shape[1:])
    best = _top_ids(blocks.amax(2), block_ids, min(count, len(block_ids)))[:, :, None]
    candidates = blocks.gather(1, best.expand(-1, -1, BLOCK_TOKENS))
    return _top_ids(candidates.flatten(1), (best * BLOCK_TOKENS + offsets).flatten(1), count)


def _top_ids(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return those int64[N, count] of ``ids`` int64[N, M] or [M] with the largest ``values`` float32[N, M], ties by id.

    ``topk`` alone returns any of several equal values. So it gets integer keys: above, the float's bits made monotonic
    (negative numbers have theirs inverted, and -0 becomes +0); below, the complement of the id.
    """
    bits = (values + 0.0).view(torch.int32)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (_MAX_ID - ids)
    return _MAX_ID - (keys.topk(count).values & _MAX_ID)


def _capped(requested: int | None) -> int:
    return _NOT_REQUESTED if requested is None else min(requested, MAX_TOP_LOGPROBS)
