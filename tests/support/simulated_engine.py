"""A simulated engine: KV memory holds hashes, so any fault in the page tables changes the tokens.

The KV cell of a token is a hash of the token and of all cells before it, *as read through the page table*;
the next token is a function of all cells. A row that points at a wrong page, a page that was freed and
overwritten, or a chunk that was never computed yields other tokens than ``continuation``, and other
log-probabilities than ``token_logprobs``. ``NAN`` stands for a NaN: a cell becomes one where ``nan_token`` is
computed, or where any cell before it is one. An adapter in the LoRA slot of a row changes where its hashes begin, so a wrong
adapter at any token changes the tokens, too. Steps run only when their result is requested, in the order of
launch, so a plan that is changed after its launch is noticed, too.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from skiff_runtime.messages import NO_TOKEN
from skiff_runtime.step import (
    NAN_LOGITS,
    NO_LORA_SLOT,
    LogprobsOutput,
    PromptLogprobsOutput,
    SlotOpened,
    StepPlan,
    StepResult,
)

VOCAB: Final = 40
NAN: Final = -7
_START: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def _mix(state: int, value: int) -> int:
    mixed = ((state ^ value) * 0xD6E8FEB86659FD93 + value + 1) & _MASK
    return mixed ^ (mixed >> 29)


def _token(state: int) -> int:
    return (state >> 7) % VOCAB


def _start_of(adapter_id: int) -> int:
    return _mix(_START, adapter_id) if adapter_id else _START


def cells(tokens: Sequence[int], adapter_id: int = 0) -> list[int]:
    """Return the KV cells of a sequence, computed with an adapter or the base model (0)."""
    state, result = _start_of(adapter_id), []
    for token in tokens:
        result.append(_mix(state, token))
        state = _mix(state, result[-1])
    return result


def continuation(prompt: Sequence[int], count: int, adapter_id: int = 0) -> list[int]:
    """Return the ``count`` tokens that a correct engine generates after ``prompt``."""
    state = _start_of(adapter_id)
    for cell in cells(prompt, adapter_id):
        state = _mix(state, cell)
    output: list[int] = []
    for _ in range(count):
        output.append(_token(state))
        state = _mix(state, _mix(state, output[-1]))
    return output


def token_logprobs(
    before: Sequence[int], token: int, top: int, adapter_id: int = 0
) -> tuple[float, list[int], list[float]]:
    """Return the log-probability of ``token`` after ``before`` by a correct engine, and its ``top`` tokens with theirs."""
    state = _start_of(adapter_id)
    for cell in cells(before, adapter_id):
        state = _mix(state, cell)
    return _logprobs_of(state, token, top)


def _logprobs_of(state: int, token: int, top: int) -> tuple[float, list[int], list[float]]:
    ids = [_token(state + 977 * rank) for rank in range(top)]
    return -float(_mix(state, token) % 4096) / 16, ids, [-float(rank) for rank in range(top)]


class SimulatedStep:
    """The handle of a launched step."""

    def __init__(self, engine: "SimulatedEngine", plan: StepPlan) -> None:
        self.plan = plan
        self.outcome: StepResult | None = None
        self._engine = engine

    def wait(self, timeout_seconds: float) -> bool:
        return True

    def result(self) -> StepResult:
        while self.outcome is None:
            self._engine.run_next()
        return self.outcome


class SimulatedEngine:
    """Keeps every launched plan in ``plans``."""

    def __init__(self, *, num_pages: int, page_size: int, slots: int, max_model_len: int) -> None:
        self.plans: list[StepPlan] = []
        self.nan_token: int | None = None
        self._page_size = page_size
        self.memory = [[-1] * page_size for _ in range(num_pages)]
        """KV cells by page and offset."""
        self._pages = [[-1] * (-(-max_model_len // page_size)) for _ in range(slots)]
        self._tokens = [[-1] * (max_model_len + 1) for _ in range(slots)]
        self._opened: dict[int, SlotOpened] = {}
        self._pending: deque[SimulatedStep] = deque()
        self._lora_slots: dict[int, int] = {}
        self.registered: set[int] = set()
        """Adapters in host memory."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        assert plan.number == len(self.plans) + 1
        columns = (plan.slots, plan.starts, plan.lengths, plan.page_slots, plan.page_columns, plan.page_ids)
        assert all(column.dtype == np.int32 for column in columns) and plan.samples.dtype == np.bool_
        table_cells = list(zip(plan.page_slots.tolist(), plan.page_columns.tolist(), strict=True))
        assert len(set(table_cells)) == len(table_cells), "a cell of the page table is set twice"
        loads = [load.lora_slot for load in plan.lora_loads]
        assert len(set(loads)) == len(loads), "a LoRA slot is loaded twice"
        assert all(load.adapter_id in self.registered for load in plan.lora_loads)
        self.plans.append(plan)
        self._pending.append(SimulatedStep(self, plan))
        return self._pending[-1]

    def run_next(self) -> None:
        """Run the oldest launched step."""
        step = self._pending.popleft()
        plan = step.plan
        for load in plan.lora_loads:
            assert load.adapter_id in self.registered, "dropped before the step that loads it has run"
            self._lora_slots[load.lora_slot] = load.adapter_id
        for opened in plan.opened:
            self._tokens[opened.slot][: len(opened.tokens)] = opened.tokens.tolist()
            self._opened[opened.slot] = opened
        for slot, column, page in zip(plan.page_slots, plan.page_columns, plan.page_ids, strict=True):
            self._pages[slot][column] = int(page)
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        for row in rows:
            self._compute(*row)
        # Rows sample only after all have computed: a page that two rows write is wrong for one of them.
        sampled = [row for row, samples in zip(rows, plan.samples, strict=True) if samples]
        for slot, start, length in sampled:
            self._tokens[slot][start + length] = _token(self._read(slot, start + length))
        positions = [(slot, start + length) for slot, start, length in sampled]
        tokens = np.array([self._sample(slot, position) for slot, position in positions], np.int32)
        requested = [index for index, (slot, _) in enumerate(positions) if self._num_top(slot) is not None]
        top = max((self._num_top(positions[index][0]) or 0 for index in requested), default=0)
        prompts = (self._prompt_logprobs(*row) for row in rows)
        step.outcome = StepResult(
            tokens,
            np.array(requested, np.int32),
            self._logprobs([positions[index] for index in requested], top) if requested else None,
            tuple(chunk for chunk in prompts if chunk is not None),
        )

    def _sample(self, slot: int, position: int) -> int:
        """Return the token at ``position``. A grammar's data is the number of output tokens that it admits."""
        opened = self._opened[slot]
        if self._read(slot, position) == NAN:
            return NAN_LOGITS
        if opened.grammar is not None and position - opened.prompt_tokens >= int(opened.grammar.data):
            return NO_TOKEN
        return self._tokens[slot][position]

    def _num_top(self, slot: int) -> int | None:
        return self._opened[slot].sampling.logprobs

    def _prompt_logprobs(self, slot: int, start: int, length: int) -> PromptLogprobsOutput | None:
        """Return the log-probabilities of the prompt tokens that the row's logits predict."""
        opened = self._opened[slot]
        top, end = opened.sampling.prompt_logprobs, min(start + length + 1, opened.prompt_tokens)
        if top is None or end <= start + 1:
            return None
        return PromptLogprobsOutput(
            slot, start + 1, self._logprobs([(slot, position) for position in range(start + 1, end)], top)
        )

    def _logprobs(self, positions: list[tuple[int, int]], top: int) -> LogprobsOutput:
        found = [
            _logprobs_of(self._read(slot, position), self._tokens[slot][position], top)
            for slot, position in positions
        ]
        return LogprobsOutput(
            np.array([logprob for logprob, _, _ in found], np.float32),
            np.array([ids for _, ids, _ in found], np.int32).reshape(len(found), top),
            np.array([values for _, _, values in found], np.float32).reshape(len(found), top),
            np.arange(1, len(found) + 1, dtype=np.int32),
        )

    def _read(self, slot: int, end: int) -> int:
        """Return the hash state after all cells before position ``end``."""
        lora_slot = self._opened[slot].lora_slot
        state = _START if lora_slot == NO_LORA_SLOT else _start_of(self._lora_slots[lora_slot])
        for position in range(end):
            page = self.memory[self._pages[slot][position // self._page_size]]
            cell = page[position % self._page_size]
            state = NAN if NAN in (state, cell) else _mix(state, cell)
        return state

    def _compute(self, slot: int, start: int, length: int) -> None:
        """Compute and write the cells of one row."""
        state = self._read(slot, start)
        for position in range(start, start + length):
            token = self._tokens[slot][position]
            cell = NAN if state == NAN or token == self.nan_token else _mix(state, token)
            self.memory[self._pages[slot][position // self._page_size]][position % self._page_size] = cell
            state = NAN if cell == NAN else _mix(state, cell)
