"""The input batch of a step: a plan turned into device tensors, and the tables that stay on the device between steps."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.engine.shared_prefix import SharedPrefixFinder
from skiff_runtime.engine.staging_buffers import StagingBuffers, upload
from skiff_runtime.kernels.prepare_inputs import prepare_inputs, write_cells
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, unpack_shared_prefixes
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import NO_LORA_SLOT, Int32, StepPlan


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that yield a token: their slots, and the positions that the new tokens will have.

    ``slots`` and ``positions`` int[S] are on the device; ``host_slots`` and ``host_positions`` are the same on the host.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    host_slots: Int32
    host_positions: Int32

    def select(self, rows: NDArray[np.int64], device_rows: torch.Tensor) -> "SampledRows":
        """Return some of the rows; ``rows`` and ``device_rows`` [N] are the same indices on host and device."""
        return SampledRows(
            self.slots[device_rows],
            self.positions[device_rows],
            self.host_slots[rows],
            self.host_positions[rows],
        )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one step: T tokens of R rows, S of which are sampled.

    ``logits_indices`` int[S] are the indices of the sampled rows' last tokens among the T. ``lora_slots`` int32[T] are the
    tokens' LoRA slots, None if no row has an adapter.
    """

    inputs: StepInputs
    attention: AttentionBatch
    logits_indices: torch.Tensor
    sampled: SampledRows
    lora_slots: torch.Tensor | None = None


class SlotTables:
    """Device tables by slot: all known tokens, and the pages of their K and V.

    ``tokens`` is int32[slots + 1, max_model_len + 1], ``page_table`` int32[slots + 1, pages]. The last line of both
    belongs to the padding slot, ``padding_slot``, whose rows pad a batch; its pages are all the pool's padding page.
    """

    def __init__(self, slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._device = device
        self.page_size = page_size
        self.padding_slot = slots
        self.tokens = torch.zeros((slots + 1, max_model_len + 1), dtype=torch.int32, device=device)
        pages = -(-max_model_len // page_size)
        self.page_table = torch.zeros((slots + 1, pages), dtype=torch.int32, device=device)
        self.block_table: torch.Tensor | None = None
        self.shared_prefix: SharedPrefixFinder | None = None
        self.staging = StagingBuffers(device)
        self.lora_slots: torch.Tensor | None = None
        """The LoRA slot of each slot's request, int32 [slots + 1]; None if adapters are not served."""
        self._host_lora_slots = np.full(slots + 1, NO_LORA_SLOT, np.int32)

    def set_padding_page(self, page: int, *, block_table: bool) -> None:
        """Set every page to the pool's padding page; with ``block_table``, keep the rows' pages in their order, too."""
        self.page_table.fill_(page)
        if block_table:
            self.block_table = torch.full_like(self.page_table[:-1], page)

    def enable_shared_prefix(self, max_rows: int) -> None:
        """Search for shared prefixes of decode rows, for a backend that reads one for ``max_rows`` rows together."""
        if max_rows > 1:
            slots, max_model_len = self.tokens.shape[0] - 1, self.tokens.shape[1] - 1
            self.shared_prefix = SharedPrefixFinder(
                slots,
                max_model_len,
                self.page_size,
                max_rows=max_rows,
                tuning=tuning_for(self._device).shared_prefix,
            )

    def enable_lora(self) -> None:
        """Keep the LoRA slots of requests; at first no slot has one."""
        self.lora_slots = torch.from_numpy(self._host_lora_slots.copy()).to(self._device)

    def has_adapters(self, slots: Int32) -> bool:
        """Return whether the request of any of these slots has an adapter."""
        return self.lora_slots is not None and bool((self._host_lora_slots[slots] != NO_LORA_SLOT).any())

    def apply(self, plan: StepPlan) -> None:
        """Write the tokens and LoRA slots of newly opened slots, and the changed cells of the page table."""
        self._set_lora_slots(plan)
        if self.shared_prefix is not None:
            self.shared_prefix.apply(plan)
        if plan.opened:
            known = upload(
                np.concatenate([each.tokens for each in plan.opened]).astype(np.int32), self._device
            )
            parts = torch.split(known, [len(each.tokens) for each in plan.opened])
            for opened, part in zip(plan.opened, parts, strict=True):
                self.tokens[opened.slot, : len(part)].copy_(part)
        if len(plan.page_ids):
            cells = np.stack((plan.page_slots, plan.page_columns, plan.page_ids))
            write_cells(self.page_table, self.staging.send(cells))

    def make_batch(self, plan: StepPlan) -> InputBatch:
        """Build the step's tensors.

        Token ids are read from the table on the device, where the step before may write its tokens only just before:
        the host does not know them yet.
        """
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        rows = self.staging.send(np.stack((plan.slots, plan.starts, plan.lengths, ends - plan.lengths)))
        sampled = np.flatnonzero(plan.samples)
        host_slots, host_positions = plan.slots[sampled], (plan.starts + plan.lengths)[sampled]
        indices, slots, positions = self.staging.send(
            np.stack((ends[sampled] - 1, host_slots, host_positions))
        )
        block_table = None if self.block_table is None else self.block_table[: len(plan.slots)]
        inputs = prepare_inputs(
            rows,
            self.tokens,
            self.page_table,
            self.page_size,
            total=plan.num_tokens,
            max_len=int(plan.lengths.max()),
            block_table=block_table,
        )
        attention = AttentionBatch(
            starts=plan.starts,
            lengths=plan.lengths,
            decode_rows=plan.decode_rows,
            rows=rows,
            seq_lens=inputs.seq_lens,
            page_table=self.page_table,
            block_table=block_table,
            shared_prefixes=self._find_shared(
                plan.slots[: plan.decode_rows], plan.starts[: plan.decode_rows]
            ),
        )
        return InputBatch(
            inputs,
            attention,
            indices,
            SampledRows(slots, positions, host_slots, host_positions),
            self._find_lora_slots(plan),
        )

    def _set_lora_slots(self, plan: StepPlan) -> None:
        if self.lora_slots is None:
            return
        changed = [each for each in plan.opened if self._host_lora_slots[each.slot] != each.lora_slot]
        if changed:
            cells = np.array([(each.slot, 0, each.lora_slot) for each in changed], np.int32).T
            self._host_lora_slots[cells[0]] = cells[2]
            write_cells(self.lora_slots.view(-1, 1), self.staging.send(np.ascontiguousarray(cells)))

    def _find_lora_slots(self, plan: StepPlan) -> torch.Tensor | None:
        """Return the LoRA slot of each token, int32 [T] on the device; None if no row has an adapter."""
        if not self.has_adapters(plan.slots):
            return None
        return self.staging.send(np.repeat(self._host_lora_slots[plan.slots], plan.lengths))

    def _find_shared(self, slots: Int32, starts: Int32) -> SharedPrefixes | None:
        """Return the prefixes that decode rows share, on the device; None if sharing is not profitable."""
        if self.shared_prefix is None:
            return None
        packed = self.shared_prefix.find(slots, starts, len(slots))
        return None if packed is None else unpack_shared_prefixes(self.staging.send(packed), len(slots))

    def append(self, rows: SampledRows, tokens: torch.Tensor) -> None:
        """Write sampled tokens [S] where the next step reads them; a ``NAN_LOGITS`` becomes token 0, a valid index."""
        readable = tokens.int().clamp(min=0)
        write_cells(self.tokens, torch.stack((rows.slots.int(), rows.positions.int(), readable)))
