"""An engine on paper: KV memory as numbers, so that any fault in the page tables shows in the tokens.

The KV cell of a token is a hash of the token and of the cell before it, *as read through
the page table*; the next token is a function of the last cell. A row that points at a
wrong page, a page that was freed and overwritten, or a chunk that was never computed
gives other tokens than ``continuation``. Steps run only when their result is asked for,
in order of launch: a plan that still changes after its launch is found out, too.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from skiff_runtime.step import Int32, StepPlan

VOCAB: Final = 40
_START: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def _cell(before: int, token: int) -> int:
    mixed = ((before ^ token) * 0xD6E8FEB86659FD93 + token + 1) & _MASK
    return mixed ^ (mixed >> 29)


def _token(cell: int) -> int:
    return (cell >> 7) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What a right engine answers: ``count`` tokens after ``prompt``."""
    cell = _START
    for token in prompt:
        cell = _cell(cell, token)
    output: list[int] = []
    for _ in range(count):
        output.append(_token(cell))
        cell = _cell(cell, output[-1])
    return output


class PaperStep:
    """The handle of a launched step."""

    def __init__(self, engine: "PaperEngine", plan: StepPlan) -> None:
        self.plan = plan
        self.tokens: Int32 | None = None
        self._engine = engine

    def result(self) -> Int32:
        while self.tokens is None:
            self._engine.run_next()
        return self.tokens


class PaperEngine:
    """Keeps every plan that it was given in ``plans``."""

    def __init__(self, *, num_pages: int, page_size: int, slots: int, max_model_len: int) -> None:
        self.plans: list[StepPlan] = []
        self._page_size = page_size
        self._cells = [[-1] * page_size for _ in range(num_pages)]
        self._pages = [[-1] * (-(-max_model_len // page_size)) for _ in range(slots)]
        self._tokens = [[-1] * (max_model_len + 1) for _ in range(slots)]
        self._pending: deque[PaperStep] = deque()

    def launch(self, plan: StepPlan) -> PaperStep:
        assert plan.number == len(self.plans) + 1
        self.plans.append(plan)
        self._pending.append(PaperStep(self, plan))
        return self._pending[-1]

    def run_next(self) -> None:
        """Run the oldest launched step."""
        step = self._pending.popleft()
        plan = step.plan
        for opened in plan.opened:
            self._tokens[opened.slot][: len(opened.tokens)] = opened.tokens.tolist()
        for slot, column, page in zip(plan.page_slots, plan.page_columns, plan.page_ids, strict=True):
            self._pages[slot][column] = int(page)
        sampled = []
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples, strict=True
        ):
            token = self._row(slot, start, length)
            if samples:
                self._tokens[slot][start + length] = token
                sampled.append(token)
        step.tokens = np.array(sampled, np.int32)

    def _row(self, slot: int, start: int, length: int) -> int:
        """Write the cells of one row, reading all before them; its next token."""
        cell = _START
        for position in range(start + length):
            page = self._cells[self._pages[slot][position // self._page_size]]
            offset = position % self._page_size
            if position >= start:
                page[offset] = _cell(cell, self._tokens[slot][position])
            cell = page[offset]
        return _token(cell)
