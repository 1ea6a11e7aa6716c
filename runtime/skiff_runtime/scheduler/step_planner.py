"""The step planner: which tokens the next step computes, under the budget of ``--max-num-batched-tokens``.

A step is a mixed batch: one row for each decoding request, then chunks of prompts (chunked prefill) with
what remains of the budget. Where the KV cache runs out of pages, the last requests in queue order are
preempted first.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.config import Config
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.adapters import Adapters
from skiff_runtime.scheduler.admission import Admission
from skiff_runtime.scheduler.kv_cache_manager import KVCacheManager, PageTableFixups
from skiff_runtime.scheduler.request import QueueKey, Request
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.schedule_policy import SchedulePolicy
from skiff_runtime.scheduler.slots import SlotIndices, Slots
from skiff_runtime.scheduler.step_builder import PrefillChunk, StepBuilder
from skiff_runtime.step import SlotOpened, StepPlan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned step, and what planning it led to."""

    step: StepPlan
    started: list[Request]
    """Requests that run for the first time."""
    duplicates: list[Int32]
    """Pages to free when the step has retired."""
    preempted: int
    """Requests that were preempted for this step."""


class StepPlanner:
    """Plans steps. Decides by counts alone, never by time, so that all ranks plan the same."""

    def __init__(
        self,
        config: Config,
        *,
        slots: Slots,
        queue: RequestQueue,
        policy: SchedulePolicy,
        kv_cache: KVCacheManager,
        adapters: Adapters,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._mixed_budget = config.mixed_prefill_tokens or config.max_num_batched_tokens
        self._slots = slots
        self._queue = queue
        self._policy = policy
        self._kv_cache = kv_cache
        self._adapters = adapters
        self._admission = Admission(kv_cache.page_size)
        self._fixups = PageTableFixups()
        self._started: list[Request] = []
        self._number = 0

    def is_out_of_pages(self) -> bool:
        """Return whether the decoding requests need more pages than are available.

        The end of the step in flight may free some, so the caller retires it before it plans. A plan made
        while this is true preempts requests, which must not be in flight.
        """
        available = self._kv_cache.available_pages
        if available >= self._slots.count:
            return False
        rows = np.flatnonzero(self._slots.decoding)
        return int(np.count_nonzero(self._needs_page(rows))) > available

    def plan(self) -> PlannedStep | None:
        """Plan the next step; None when there is nothing to compute."""
        preempted = 0
        while self.is_out_of_pages():
            self._preempt()
            preempted += 1
        earlier_fixups, self._started = len(self._fixups.pending), []
        builder = self._plan_decode()
        budget = self._budget - builder.num_rows
        budget = self._resume(builder, min(budget, self._mixed_budget) if builder.num_rows else budget)
        self._admit(builder, budget)
        if not builder.num_rows:
            return None
        self._apply_fixups(builder, earlier_fixups)
        self._number += 1
        step = builder.build(self._number)
        self._policy.record_plan(step.num_tokens)
        self._slots.count_launch(step.slots)
        return PlannedStep(step, self._started, self._fixups.take_duplicates(), preempted)

    def plan_capture(self) -> PlannedStep:
        """Plan a step without rows, for a capture alone."""
        self._number += 1
        nothing = np.empty(0, np.int32)
        return PlannedStep(StepBuilder(nothing, nothing).build(self._number), [], [], 0)

    def _needs_page(self, slots: SlotIndices) -> NDArray[np.bool_]:
        """Return which of these decoding slots begin a page with their next token: bool[len(slots)]."""
        filled = self._slots.num_pages[slots] * self._kv_cache.page_size
        needs_page: NDArray[np.bool_] = self._slots.num_computed_tokens[slots] >= filled
        return needs_page

    def _plan_decode(self) -> StepBuilder:
        """Start a step with one row for each decoding request, the longest contexts first.

        Longest first is the list-scheduling rule of Graham, "Bounds on multiprocessing timing anomalies"
        (1969): attention's work over many processors then ends evenly.
        """
        slots = self._slots
        rows = np.flatnonzero(slots.decoding)
        rows = rows[np.argsort(-slots.num_computed_tokens[rows], kind="stable")]
        builder = StepBuilder(rows, slots.num_computed_tokens[rows])
        lacking = rows[self._needs_page(rows)]
        if len(lacking):
            columns, pages = self._kv_cache.append_page_each(lacking)
            builder.set_cells(lacking, columns, pages)
        slots.plan_decode(rows)
        if len(rows):
            self._admission.decay_ratio()
        return builder

    def _resume(self, builder: StepBuilder, budget: int) -> int:
        """Plan further chunks of started prompts, in queue order; return the budget that is left."""
        started = [self._slots.request(int(slot)) for slot in np.flatnonzero(self._slots.prefilling)]
        for request in sorted(started, key=_get_queue_key):
            budget -= self._plan_chunk(builder, request, budget)
        return budget

    def _admit(self, builder: StepBuilder, budget: int) -> None:
        """Admit waiting requests in the policy's order, while budget, slots and pages last."""
        if budget <= 0 or self._slots.is_full or not len(self._queue):
            return
        expected_pages = self._admission.estimate_pages(self._slots)
        for request in self._policy.candidates():
            if budget <= 0 or self._slots.is_full:
                return
            if not self._adapters.can_start(request):
                self._adapters.hold_back(request)
                continue
            if not self._try_open(builder, request, expected_pages):
                return
            self._queue.remove(request)
            length = self._plan_chunk(builder, request, budget)
            assert length, "admitted without memory for a page, though the estimate counts one at least"
            budget -= length
            expected_pages += self._admission.estimate_pages_of(request.slot, self._slots)

    def _try_open(self, builder: StepBuilder, request: Request, expected_pages: int) -> bool:
        """Give a request a slot if its pages are expected to fit beside the others' ``expected_pages``.

        A request that runs alone always fits: longer ones were refused on arrival.
        """
        match = self._kv_cache.match_prefix(request)
        if self._slots.num_occupied and not self._admission.has_room(
            request,
            cached_pages=match.handle.depth,
            available_pages=self._kv_cache.available_pages,
            expected_pages=expected_pages,
        ):
            self._kv_cache.release_match(match)
            return False
        self._kv_cache.allocate(request, match)
        if (load := self._adapters.acquire(request)) is not None:
            builder.add_lora_load(load)
        builder.add_opened(
            SlotOpened(
                request.slot,
                request.tokens,
                request.sampling,
                request.prompt_tokens,
                request.grammar,
                request.pooling,
                request.lora_slot,
            )
        )
        builder.set_cells_from(request.slot, 0, match.pages)
        if not request.has_started:
            request.start(cached_tokens=match.handle.depth * self._kv_cache.page_size)
            self._started.append(request)
        return True

    def _plan_chunk(self, builder: StepBuilder, request: Request, budget: int) -> int:
        """Plan the next tokens of a prompt, as many as budget and memory allow; return how many."""
        slot, slots, page_size = request.slot, self._slots, self._kv_cache.page_size
        start, num_pages = int(slots.num_computed_tokens[slot]), int(slots.num_pages[slot])
        left = int(slots.num_prefill_tokens[slot]) - start
        room = (num_pages + self._kv_cache.available_pages) * page_size - start
        length = min(left, budget, room)
        if length <= 0:
            return 0
        missing = math.ceil((start + length) / page_size) - num_pages
        first_column, pages = self._kv_cache.append_pages(slot, missing)
        builder.set_cells_from(slot, first_column, pages)
        samples = slots.plan_prefill(slot, length)
        builder.add_chunk(PrefillChunk(slot, start, length, samples=samples))
        self._kv_cache.cache_chunk(request, self._fixups)
        return length

    def _apply_fixups(self, builder: StepBuilder, count: int) -> None:
        """Point rows at the cache's pages where chunks of earlier steps found duplicates.

        ``count`` fixups are of earlier steps. Those of this step must wait: it still writes the duplicates
        and reads them.
        """
        pending = self._fixups.pending
        for request, columns, pages in pending[:count]:
            if self._slots.has_request(request):  # else it has ended, and the slot may be another's by now
                builder.set_cells(np.full(len(columns), request.slot), columns, pages)
        del pending[:count]

    def _preempt(self) -> None:
        """Preempt the running request that is last in queue order: free its memory and queue it again.

        Its output so far is kept with it, and its pages go to the prefix cache, so only what is evicted
        there must be computed again.
        """
        slots = self._slots
        request = max((slots.request(int(slot)) for slot in np.flatnonzero(slots.alive)), key=_get_queue_key)
        request.preempt(slots.tokens[request.slot, : slots.num_tokens[request.slot]].copy())
        self._kv_cache.free(request)
        self._adapters.release(request)
        self._fixups.discard(request)
        self._admission.raise_ratio(slots)
        self._queue.push(request)


def _get_queue_key(request: Request) -> QueueKey:
    return request.queue_key
