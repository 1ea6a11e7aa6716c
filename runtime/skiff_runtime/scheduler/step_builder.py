"""A step while it is being planned: rows and page-table cells, gathered into one ``StepPlan``."""

import numpy as np

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.slots import Rows
from skiff_runtime.step import SlotOpened, StepPlan

Cells = tuple[Rows | Int32, Int32, Int32]


class Draft:
    """Decode rows as columns, then prefill chunks one by one."""

    def __init__(self, decode_slots: Rows, decode_starts: Int32) -> None:
        self._decode_slots = decode_slots
        self._decode_starts = decode_starts
        self._chunks: list[tuple[int, int, int, bool]] = []
        self._cells: list[Cells] = []
        self._opened: list[SlotOpened] = []

    @property
    def rows(self) -> int:
        return len(self._decode_slots) + len(self._chunks)

    def open(self, opened: SlotOpened) -> None:
        """A request enters a slot with this step."""
        self._opened.append(opened)

    def chunk(self, slot: int, *, start: int, length: int, samples: bool) -> None:
        """Compute ``length`` tokens of a prompt."""
        self._chunks.append((slot, start, length, samples))

    def cells(self, slots: Rows, columns: Int32, pages: Int32) -> None:
        """Set cells of the page table, one for each index."""
        self._cells.append((slots, columns, pages))

    def span(self, slot: int, first: int, pages: Int32) -> None:
        """Set cells of one row, from column ``first`` on."""
        columns = np.arange(first, first + len(pages), dtype=np.int32)
        self._cells.append((np.full(len(pages), slot, np.int64), columns, pages))

    def build(self, number: int) -> StepPlan:
        """The plan; the draft is used up."""
        decode = len(self._decode_slots)
        slots, starts, lengths = np.empty((3, self.rows), np.int32)
        samples = np.ones(self.rows, np.bool_)
        slots[:decode], starts[:decode], lengths[:decode] = self._decode_slots, self._decode_starts, 1
        for row, chunk in enumerate(self._chunks, start=decode):
            slots[row], starts[row], lengths[row], samples[row] = chunk
        page_slots, page_columns, page_ids = (self._column(index) for index in range(3))
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
        )

    def _column(self, index: int) -> Int32:
        if not self._cells:
            return np.empty(0, np.int32)
        if len(self._cells) == 1:
            return self._cells[0][index].astype(np.int32, copy=False)
        return np.concatenate([cells[index] for cells in self._cells]).astype(np.int32, copy=False)
