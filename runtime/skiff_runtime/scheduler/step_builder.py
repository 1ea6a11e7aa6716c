"""The builder of a ``StepPlan``: gathers rows and page-table cells while a step is being planned."""

from typing import NamedTuple

import numpy as np

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.slots import SlotIndices
from skiff_runtime.step import LoraLoad, SlotOpened, StepPlan


class PrefillChunk(NamedTuple):
    """A row that computes ``length`` tokens of a prompt from position ``start`` on."""

    slot: int
    start: int
    length: int
    samples: bool
    """Its last position samples a token: it is the last chunk of the prompt of a request that generates."""


class PageTableCells(NamedTuple):
    """Cells of the page table to set: row ``slots[i]``, column ``columns[i]`` becomes ``pages[i]``."""

    slots: SlotIndices
    columns: Int32
    pages: Int32


class StepBuilder:
    """Takes the decode rows as columns, then prefill chunks one by one."""

    def __init__(self, decode_slots: SlotIndices, decode_starts: Int32) -> None:
        self._decode_slots = decode_slots
        self._decode_starts = decode_starts
        self._chunks: list[PrefillChunk] = []
        self._cells: list[PageTableCells] = []
        self._opened: list[SlotOpened] = []
        self._lora_loads: list[LoraLoad] = []

    @property
    def num_rows(self) -> int:
        return len(self._decode_slots) + len(self._chunks)

    def add_opened(self, opened: SlotOpened) -> None:
        """Add a request that takes its slot with this step."""
        self._opened.append(opened)

    def add_lora_load(self, load: LoraLoad) -> None:
        """Add an adapter that takes a LoRA slot with this step."""
        self._lora_loads.append(load)

    def add_chunk(self, chunk: PrefillChunk) -> None:
        """Add a prefill row."""
        self._chunks.append(chunk)

    def set_cells(self, slots: SlotIndices, columns: Int32, pages: Int32) -> None:
        """Set one cell of the page table for each index."""
        self._cells.append(PageTableCells(slots, columns, pages))

    def set_cells_from(self, slot: int, first_column: int, pages: Int32) -> None:
        """Set the cells of one row of the page table from ``first_column`` on."""
        columns = np.arange(first_column, first_column + len(pages), dtype=np.int32)
        self.set_cells(np.full(len(pages), slot, np.int64), columns, pages)

    def build(self, number: int) -> StepPlan:
        """Return the plan. The builder must not be used afterwards."""
        decode = len(self._decode_slots)
        slots, starts, lengths = np.empty((3, self.num_rows), np.int32)
        samples = np.ones(self.num_rows, np.bool_)
        slots[:decode], starts[:decode], lengths[:decode] = self._decode_slots, self._decode_starts, 1
        for row, chunk in enumerate(self._chunks, start=decode):
            slots[row], starts[row], lengths[row], samples[row] = chunk
        page_slots, page_columns, page_ids = (self._join_cells(index) for index in range(3))
        return StepPlan(
            number=number,
            slots=slots,
            starts=starts,
            lengths=lengths,
            samples=samples,
            decode_rows=decode,
            opened=tuple(self._opened),
            page_slots=page_slots,
            page_columns=page_columns,
            page_ids=page_ids,
            lora_loads=tuple(self._lora_loads),
        )

    def _join_cells(self, index: int) -> Int32:
        """Return one field of all ``PageTableCells`` as one int32 column."""
        if not self._cells:
            return np.empty(0, np.int32)
        if len(self._cells) == 1:
            return self._cells[0][index].astype(np.int32, copy=False)
        return np.concatenate([cells[index] for cells in self._cells]).astype(np.int32, copy=False)
