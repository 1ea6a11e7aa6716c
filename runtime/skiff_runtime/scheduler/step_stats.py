"""The scheduler's numbers for metrics: gauges read when asked, counters of one step."""

from time import perf_counter
from typing import Any

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.messages import StepStats
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.result_processor import ResultProcessor
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.step_planner import Planned


class Gauges:
    """Reads clocks, which nothing that decides may do."""

    def __init__(
        self, *, memory: PagePool, queue: RequestQueue, slots: Slots, results: ResultProcessor
    ) -> None:
        self._memory = memory
        self._queue = queue
        self._slots = slots
        self._results = results
        self._evicted = 0
        self._corrupted = 0
        self._busy_since = 0.0

    def now(self) -> StepStats:
        """Where things stand, when no step has just ended."""
        return StepStats(**self._levels())

    def after(self, planned: Planned, *, launched_at: float) -> StepStats:
        """Where things stand after a step, which ran since its launch or since the end of the one before."""
        ended_at = perf_counter()
        began_at = max(launched_at, self._busy_since)
        self._busy_since = ended_at
        step, opened = planned.step, planned.opened
        return StepStats(
            **self._levels(),
            step_seconds=ended_at - began_at,
            prefill_rows=len(step.slots) - step.decode_rows,
            prefill_tokens=step.tokens - step.decode_rows,
            decode_tokens=step.decode_rows,
            preempted=planned.preempted,
            lookup_tokens=sum(each.prompt_tokens for each in opened if each.sampling.prompt_logprobs is None),
            hit_tokens=sum(request.cached_tokens for request in opened),
            queue_seconds=[launched_at - request.arrived_at for request in opened],
        )

    def _levels(self) -> dict[str, Any]:
        """Return all but what a step itself adds; evicted pages and corrupted requests are reported once."""
        memory, queue, results = self._memory, self._queue, self._results
        evicted, self._evicted = memory.evicted_pages - self._evicted, memory.evicted_pages
        corrupted, self._corrupted = results.corrupted - self._corrupted, results.corrupted
        return {
            "queued": len(queue),
            "queued_tokens": queue.tokens,
            "running": self._slots.running,
            "pages_total": memory.total_pages,
            "pages_free": memory.free_pages,
            "pages_cached": memory.cache.evictable_pages,
            "page_size": memory.cache.page_size,
            "evicted_pages": evicted,
            "corrupted": corrupted,
        }
