"""The scheduler's numbers for metrics: gauges read when asked, counters of one step."""

from time import perf_counter

from skiff_runtime.kvcache.memory import KVMemory
from skiff_runtime.messages import StepStats
from skiff_runtime.scheduler.batching import Planned
from skiff_runtime.scheduler.queue import RequestQueue
from skiff_runtime.scheduler.slots import Slots


class Gauges:
    """Reads clocks, which nothing that decides may do."""

    def __init__(self, *, memory: KVMemory, queue: RequestQueue, slots: Slots) -> None:
        self._memory = memory
        self._queue = queue
        self._slots = slots
        self._evicted = 0
        self._busy_since = 0.0

    def now(self) -> StepStats:
        """Where things stand, when no step has just ended."""
        return self._stats(step_seconds=0.0, prefill_tokens=0, decode_tokens=0, retracted=0)

    def after(self, planned: Planned, *, launched_at: float) -> StepStats:
        """Where things stand after a step, which ran since its launch or since the end of the one before."""
        ended_at = perf_counter()
        began_at = max(launched_at, self._busy_since)
        self._busy_since = ended_at
        decode_tokens = planned.step.decode_rows
        return self._stats(
            step_seconds=ended_at - began_at,
            prefill_tokens=planned.step.tokens - decode_tokens,
            decode_tokens=decode_tokens,
            retracted=planned.retracted,
        )

    def _stats(
        self, *, step_seconds: float, prefill_tokens: int, decode_tokens: int, retracted: int
    ) -> StepStats:
        cache = self._memory.cache
        evicted, self._evicted = cache.evicted_pages - self._evicted, cache.evicted_pages
        return StepStats(
            queued=len(self._queue),
            running=self._slots.running,
            pages_total=self._memory.total_pages,
            pages_free=self._memory.free_pages,
            pages_cached=cache.evictable_pages,
            page_size=cache.page_size,
            step_seconds=step_seconds,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            retracted=retracted,
            evicted_pages=evicted,
        )
