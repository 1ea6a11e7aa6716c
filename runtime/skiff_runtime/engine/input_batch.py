"""Turns a planned step into device tensors; holds the tables that stay on the device between steps."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.engine.shared_prefix import SharedPrefixFinder
from skiff_runtime.engine.staging_buffers import StagingBuffers, upload
from skiff_runtime.kernels.inputs import step_inputs, write_cells
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, unpack
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.step import Int32, StepPlan


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that get a token: their slots, and the positions that the new tokens will have.

    ``slots`` and ``positions`` int[S] are on the device, the others the same on the host.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    host_slots: Int32
    host_positions: Int32

    def take(self, rows: NDArray[np.int64], where: torch.Tensor) -> "SampledRows":
        """Some of the rows: ``rows`` and ``where`` [N] name the same ones."""
        return SampledRows(
            self.slots[where], self.positions[where], self.host_slots[rows], self.host_positions[rows]
        )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: T tokens of R rows, S of which are sampled.

    ``logits_indices`` int[S] index the sampled rows' last tokens among the T.
    """

    tokens: StepInputs
    attention: AttentionBatch
    logits_indices: torch.Tensor
    sampled: SampledRows


class SlotTables:
    """By slot: every known token, int32[slots + 1, max_model_len + 1], and the pages that hold their K and V.

    The last slot is nobody's: rows of it fill a batch. Its pages are all ``KVPool``'s padding page.
    """

    def __init__(self, slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._device = device
        self.page_size = page_size
        self.nobody = slots
        self.tokens = torch.zeros((slots + 1, max_model_len + 1), dtype=torch.int32, device=device)
        pages = -(-max_model_len // page_size)
        self.pages = torch.zeros((slots + 1, pages), dtype=torch.int32, device=device)
        self.block_table: torch.Tensor | None = None
        self.prefixes: SharedPrefixFinder | None = None
        self.staging = StagingBuffers(device)

    def set_padding_page(self, page: int, *, block_table: bool) -> None:
        """Take note of the pool's padding page, and of whether attention wants the rows' pages in order."""
        self.pages.fill_(page)
        if block_table:
            self.block_table = torch.full_like(self.pages[:-1], page)

    def enable_shared_prefix(self, members: int) -> None:
        """Look for prefixes that decode rows have in common, for attention that reads them for ``members`` at once."""
        if members > 1:
            slots, longest = self.tokens.shape[0] - 1, self.tokens.shape[1] - 1
            self.prefixes = SharedPrefixFinder(slots, longest, self.page_size, members=members)

    def apply(self, plan: StepPlan) -> None:
        """Take over tokens of newly opened slots and changed cells of the page table."""
        if self.prefixes is not None:
            self.prefixes.apply(plan)
        if plan.opened:
            known = upload(
                np.concatenate([each.tokens for each in plan.opened]).astype(np.int32), self._device
            )
            parts = torch.split(known, [len(each.tokens) for each in plan.opened])
            for opened, part in zip(plan.opened, parts, strict=True):
                self.tokens[opened.slot, : len(part)].copy_(part)
        if len(plan.page_ids):
            cells = np.stack((plan.page_slots, plan.page_columns, plan.page_ids))
            write_cells(self.pages, self.staging.send(cells))

    def inputs(self, plan: StepPlan) -> InputBatch:
        """The step's tensors; token ids are read from the table, where the last step may just have put them."""
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        rows = self.staging.send(np.stack((plan.slots, plan.starts, plan.lengths, ends - plan.lengths)))
        sampled = np.flatnonzero(plan.samples)
        host_slots, host_positions = plan.slots[sampled], (plan.starts + plan.lengths)[sampled]
        last, slots, positions = self.staging.send(np.stack((ends[sampled] - 1, host_slots, host_positions)))
        block_table = None if self.block_table is None else self.block_table[: len(plan.slots)]
        made = step_inputs(
            rows,
            self.tokens,
            self.pages,
            self.page_size,
            total=plan.tokens,
            longest=int(plan.lengths.max()),
            block_table=block_table,
        )
        attention = AttentionBatch(
            starts=plan.starts,
            lengths=plan.lengths,
            decode_rows=plan.decode_rows,
            rows=rows,
            contexts=made.contexts,
            page_table=self.pages,
            block_table=block_table,
            shared=self._shared(plan.slots[: plan.decode_rows], plan.starts[: plan.decode_rows]),
        )
        sampled_rows = SampledRows(slots, positions, host_slots, host_positions)
        return InputBatch(made, attention, last, sampled_rows)

    def _shared(self, slots: Int32, starts: Int32) -> SharedPrefixes | None:
        """What decode rows have in common, if that is worth the while."""
        packed = None if self.prefixes is None else self.prefixes.find(slots, starts, len(slots))
        return None if packed is None else unpack(self.staging.send(packed), len(slots))

    def append(self, rows: SampledRows, tokens: torch.Tensor) -> None:
        """Write sampled tokens [S] where the next step reads them; token 0 in the place of ``NAN_LOGITS``."""
        readable = tokens.int().clamp(min=0)
        write_cells(self.tokens, torch.stack((rows.slots.int(), rows.positions.int(), readable)))
