"""Turns a planned step into device tensors; holds the tables that stay on the device between steps."""

from dataclasses import dataclass

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.kernels.inputs import read_cells, rows_of_tokens, write_cells
from skiff_runtime.step import Int32, StepPlan


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that get a token: their slots, and the positions that the new tokens will have.

    ``slots`` and ``positions`` int64[S] are on the device, the others the same on the host.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    host_slots: Int32
    host_positions: Int32


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: T tokens of R rows, S of which are sampled.

    ``last_tokens`` int64[S] index the sampled rows' last tokens among the T.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    last_tokens: torch.Tensor
    sampled: SampledRows


class Tables:
    """By slot: every known token, int32[slots, max_model_len + 1], and the pages that hold their K and V."""

    def __init__(self, slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._device = device
        self._page_size = page_size
        self.tokens = torch.zeros((slots, max_model_len + 1), dtype=torch.int32, device=device)
        pages = -(-max_model_len // page_size)
        self._pages = torch.zeros((slots, pages), dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take over tokens of newly opened slots and changed cells of the page table."""
        for opened in plan.opened:
            known = torch.from_numpy(opened.tokens.astype(np.int32))
            self.tokens[opened.slot, : len(opened.tokens)].copy_(known)
        if len(plan.page_ids):
            rows, columns, ids = self._upload(plan.page_slots, plan.page_columns, plan.page_ids)
            write_cells(self._pages, rows, columns, ids)

    def inputs(self, plan: StepPlan) -> InputBatch:
        """The step's tensors; token ids are read from the table, where the last step may just have put them."""
        slots, starts, lengths, ends = self._upload(
            plan.slots, plan.starts, plan.lengths, np.cumsum(plan.lengths)
        )
        rows = rows_of_tokens(lengths, plan.tokens)
        positions = torch.arange(plan.tokens, device=self._device) + (starts + lengths - ends)[rows]
        token_slots = slots[rows]
        pages = read_cells(self._pages, token_slots, positions // self._page_size)
        sampled = np.flatnonzero(plan.samples)
        (chosen,) = self._upload(sampled)
        return InputBatch(
            token_ids=read_cells(self.tokens, token_slots, positions),
            positions=positions,
            attention=AttentionBatch(
                starts=plan.starts,
                lengths=plan.lengths,
                slots=slots,
                page_table=self._pages,
                locations=pages * self._page_size + positions % self._page_size,
            ),
            last_tokens=ends[chosen] - 1,
            sampled=SampledRows(
                slots=slots[chosen],
                positions=(starts + lengths)[chosen],
                host_slots=plan.slots[sampled],
                host_positions=(plan.starts + plan.lengths)[sampled],
            ),
        )

    def append(self, rows: SampledRows, tokens: torch.Tensor) -> None:
        """Write sampled tokens [S] where the next step reads them."""
        write_cells(self.tokens, rows.slots, rows.positions, tokens)

    def _upload(
        self, *columns: np.ndarray[tuple[int], np.dtype[np.signedinteger]]
    ) -> tuple[torch.Tensor, ...]:
        """Equally long columns to the device, in one copy, as int64."""
        packed = np.stack(columns).astype(np.int64)
        return torch.from_numpy(packed).to(self._device, non_blocking=True).unbind()
