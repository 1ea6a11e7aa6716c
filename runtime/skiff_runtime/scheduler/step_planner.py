"""What the next step computes: a row for each decoding request, then prefill chunks, under a budget."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.config import Config
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.admission import Admission
from skiff_runtime.scheduler.kv_cache_manager import Rewrites, Tenancy
from skiff_runtime.scheduler.request import NEVER, Place, Request
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.schedule_policy import SchedulePolicy
from skiff_runtime.scheduler.slots import Rows, Slots
from skiff_runtime.scheduler.step_builder import Draft
from skiff_runtime.step import SlotOpened, StepPlan


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step and what planning it brought about."""

    step: StepPlan
    opened: list[Request]
    """Requests that run for the first time."""
    duplicates: list[Int32]
    """Pages to free when the step has retired."""
    preempted: int


class StepPlanner:
    """Plans steps. It decides by counts alone, never by time, so that all ranks plan the same."""

    def __init__(
        self,
        config: Config,
        *,
        memory: PagePool,
        slots: Slots,
        queue: RequestQueue,
        order: SchedulePolicy,
        tenancy: Tenancy,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._mixed_budget = config.mixed_prefill_tokens or config.max_num_batched_tokens
        self._page_size = config.page_size
        self._memory = memory
        self._slots = slots
        self._queue = queue
        self._order = order
        self._tenancy = tenancy
        self._admission = Admission(config.page_size)
        self._rewrites = Rewrites()
        self._opened: list[Request] = []
        self._number = 0

    def is_out_of_pages(self) -> bool:
        """Whether decoding cannot go on in the memory there is.

        The end of the step in flight may free some, so the caller retires it before it
        plans; a plan made when starved preempts requests, which must not be in flight.
        """
        if self._memory.available_pages >= self._slots.count:
            return False
        rows = np.flatnonzero(self._slots.decoding)
        return int(np.count_nonzero(self._lacks_page(rows))) > self._memory.available_pages

    def plan(self) -> Planned | None:
        """The next step, or None when there is nothing to compute."""
        preempted = 0
        while self.is_out_of_pages():
            self._retract()
            preempted += 1
        due, self._opened = len(self._rewrites.cells), []
        draft = self._decode()
        budget = self._budget - draft.rows
        budget = self._resume(draft, min(budget, self._mixed_budget) if draft.rows else budget)
        self._admit(draft, budget)
        if not draft.rows:
            return None
        self._rewrite(draft, due)
        self._number += 1
        step = draft.build(self._number)
        self._order.planned(step.tokens)
        self._slots.num_in_flight_steps[step.slots] += 1
        duplicates, self._rewrites.duplicates = self._rewrites.duplicates, []
        return Planned(step, self._opened, duplicates, preempted)

    def _lacks_page(self, rows: Rows) -> NDArray[np.bool_]:
        """Which decoding rows begin a page with their next token."""
        lacks: NDArray[np.bool_] = self._slots.computed[rows] >= self._slots.held[rows] * self._page_size
        return lacks

    def _decode(self) -> Draft:
        """A draft with one row for each decoding request, the longest contexts first.

        Attention over them, on many processors, so ends evenly (Graham, 1969, "Bounds on multiprocessing timing anomalies").
        """
        slots = self._slots
        rows = np.flatnonzero(slots.decoding)
        rows = rows[np.argsort(-slots.computed[rows], kind="stable")]
        starts = slots.computed[rows]
        draft = Draft(rows, starts)
        needy = rows[self._lacks_page(rows)]
        if len(needy):
            pages = self._memory.allocate(len(needy))
            columns = slots.held[needy]
            slots.pages[needy, columns] = pages
            slots.held[needy] = columns + 1
            draft.cells(needy, columns, pages)
        slots.computed[rows] = starts + 1
        slots.mark_sampling_planned(rows)
        if len(rows):
            self._admission.decay_ratio()
        return draft

    def _resume(self, draft: Draft, budget: int) -> int:
        """Go on with prompts that were begun, in the order of their places; the budget that is left."""
        begun = [self._slots.request(int(slot)) for slot in np.flatnonzero(self._slots.prefilling)]
        for request in sorted(begun, key=_place):
            budget -= self._chunk(draft, request, budget)
        return budget

    def _admit(self, draft: Draft, budget: int) -> None:
        """Let waiting requests in, in their order, while budget, slots and memory last."""
        if budget <= 0 or self._slots.full or not len(self._queue):
            return
        expected = self._admission.expected(self._slots)
        for request in self._order.candidates():
            if budget <= 0 or self._slots.full or not self._enter(draft, request, expected):
                return
            self._queue.remove(request)
            length = self._chunk(draft, request, budget)
            assert length, "admitted without memory for a page, though the estimate counts one at least"
            budget -= length
            expected += self._admission.estimate_pages_of(request.slot, self._slots)

    def _enter(self, draft: Draft, request: Request, expected: int) -> bool:
        """Give a request a slot, unless memory seems too small for what others are ``expected`` to want, too.

        One alone always fits.
        """
        match = self._tenancy.match(request)
        if self._slots.occupied and not self._admission.fits(
            request,
            cached_pages=match.handle.depth,
            available_pages=self._memory.available_pages,
            expected=expected,
        ):
            self._tenancy.release_match(match)
            return False
        self._tenancy.enter(request, match)
        draft.open(
            SlotOpened(request.slot, request.tokens, request.sampling, request.prompt_tokens, request.grammar)
        )
        draft.span(request.slot, 0, match.pages)
        if not request.opened:
            request.opened = True
            request.cached_tokens = match.handle.depth * self._page_size
            self._opened.append(request)
        return True

    def _chunk(self, draft: Draft, request: Request, budget: int) -> int:
        """Plan the next tokens of a prompt, as many as budget and memory allow; how many."""
        slot, slots = request.slot, self._slots
        start, held = int(slots.computed[slot]), int(slots.held[slot])
        left = int(slots.prompts[slot]) - start
        room = (held + self._memory.available_pages) * self._page_size - start
        length = min(left, budget, room)
        if length <= 0:
            return 0
        pages = self._memory.allocate(math.ceil((start + length) / self._page_size) - held)
        slots.pages[slot, held : held + len(pages)] = pages
        slots.held[slot] += len(pages)
        slots.computed[slot] += length
        draft.span(slot, held, pages)
        draft.chunk(slot, start=start, length=length, samples=length == left)
        self._tenancy.share(request, self._rewrites)
        if length == left:
            slots.prefilling[slot] = False
            slots.mark_sampling_planned(np.array([slot]))
        return length

    def _rewrite(self, draft: Draft, due: int) -> None:
        """Point rows at the cache's pages where inserts of earlier steps found duplicates.

        Not those of this step: it still writes, and reads, the duplicates.
        """
        for request, columns, pages in self._rewrites.cells[:due]:
            if self._slots.holds(request):  # else it has ended, and its row may be another's by now
                draft.cells(np.full(len(columns), request.slot), columns, pages)
        del self._rewrites.cells[:due]

    def _retract(self) -> None:
        """The last in order gives up its memory and waits again; its tokens go with it.

        What it computed goes to the cache, so it loses work only where that is evicted.
        """
        slots = self._slots
        request = max((slots.request(int(slot)) for slot in np.flatnonzero(slots.alive)), key=_place)
        slot = request.slot
        request.tokens = slots.tokens[slot, : slots.known[slot]].copy()
        request.looked_up = NEVER
        self._tenancy.leave(request)
        self._rewrites.forget(request)
        self._admission.raise_ratio(slots)
        self._queue.push(request)


def _place(request: Request) -> Place:
    return request.place
