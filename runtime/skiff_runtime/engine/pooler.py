"""Pooler: one vector for each request with a pooling spec, from the hidden states of its prompt.

The vector of the last token needs one row of the hidden states, as a sampled token does. A mean needs them all, over all
chunks of the prompt, so sums are kept by slot until the last chunk. Everything is computed outside of CUDA graphs, from
the hidden states that a step returns in any case.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skiff_runtime.engine.forward_pass import ForwardPass, HiddenStates
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.messages import PoolingKind, PoolingSpec
from skiff_runtime.models.footprint import PROMPT_LOGPROBS_CHUNK
from skiff_runtime.step import Int32, SlotOpened, StepPlan


@dataclass(frozen=True, slots=True)
class DevicePooled:
    """``step.PooledOutput`` on the device."""

    slots: Int32
    vectors: torch.Tensor


@dataclass(frozen=True, slots=True)
class MeanRow:
    """A chunk of ``length`` tokens, at ``offset`` among the step's, of a prompt whose mean is taken."""

    slot: int
    offset: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows of a step that contribute to vectors.

    ``last_slots`` int32[N] are those of prompts that end in the step, and whose vector depends on their last token
    alone; ``last_indices`` int32[N] are the indices of these tokens among the step's.
    """

    last_slots: Int32
    last_indices: Int32
    means: Sequence[MeanRow]


class Pooler:
    """Keeps the pooling that each slot requests, and computes the vectors."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._forward_pass = forward_pass
        self._specs: dict[int, PoolingSpec] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Register newly opened slots. A request that comes back from a preemption begins anew."""
        for each in opened:
            self._specs.pop(each.slot, None)
            self._sums.pop(each.slot, None)
            if each.pooling is not None:
                self._specs[each.slot] = each.pooling
                self._prompt_tokens[each.slot] = each.prompt_tokens

    def find_rows(self, plan: StepPlan) -> PooledRows | None:
        """Return the rows of slots that request pooling; None if there are none."""
        if not self._specs:
            return None
        ends = np.cumsum(plan.lengths)
        last_slots, last_indices, means = [], [], []
        for row in range(plan.decode_rows, len(plan.slots)):
            slot, length = int(plan.slots[row]), int(plan.lengths[row])
            spec = self._specs.get(slot)
            if spec is None:
                continue
            is_last = int(plan.starts[row]) + length == self._prompt_tokens[slot]
            if spec.kind is PoolingKind.MEAN:
                means.append(MeanRow(slot, int(ends[row]) - length, length, is_last))
            elif is_last:
                last_slots.append(slot)
                last_indices.append(int(ends[row]) - 1)
        if not (last_slots or means):
            return None
        return PooledRows(np.array(last_slots, np.int32), np.array(last_indices, np.int32), means)

    def pool_last(self, rows: PooledRows, last: HiddenStates) -> list[DevicePooled]:
        """Return the vectors of ``rows.last_slots``, whose last tokens have the hidden states ``last`` [N, hidden]."""
        by_spec: dict[PoolingSpec, list[int]] = {}
        for index, slot in enumerate(rows.last_slots.tolist()):
            by_spec.setdefault(self._specs.pop(slot), []).append(index)
        pooled = []
        for spec, chosen in by_spec.items():
            size = PROMPT_LOGPROBS_CHUNK if spec.kind is PoolingKind.LOGITS else len(chosen)
            for at in range(0, len(chosen), size):
                indices = np.array(chosen[at : at + size], np.int64)
                own = last.select(upload(indices, last.output.device))
                pooled.append(DevicePooled(rows.last_slots[indices], self._compute(spec, own)))
        return pooled

    def pool_means(self, rows: PooledRows, hidden: HiddenStates) -> list[DevicePooled]:
        """Add the hidden states of all of the step's tokens to the sums; return the means that are complete."""
        pooled = []
        for row in rows.means:
            own = hidden.select(slice(row.offset, row.offset + row.length))
            total = self._forward_pass.normalize(own).sum(0, dtype=torch.float32)
            before = self._sums.pop(row.slot, None)
            if before is not None:
                total += before
            if row.is_last:
                mean = total / self._prompt_tokens[row.slot]
                del self._specs[row.slot]
                pooled.append(DevicePooled(np.array([row.slot], np.int32), mean[None]))
            else:
                self._sums[row.slot] = total
        return pooled

    def _compute(self, spec: PoolingSpec, last: HiddenStates) -> torch.Tensor:
        """Return the vectors float32[N, size] of prompts whose last tokens have these hidden states."""
        if spec.kind is PoolingKind.LAST:
            return self._forward_pass.normalize(last).float()
        logits = self._forward_pass.whole_logits(last)
        token_ids = upload(np.array(spec.token_ids, np.int64), logits.device)
        return logits.index_select(1, token_ids).float()
