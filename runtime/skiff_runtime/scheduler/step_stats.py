"""Scheduler statistics for metrics: gauges at a moment, and what one step adds to the counters."""

from time import perf_counter
from typing import Any

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.messages import StepStats
from skiff_runtime.scheduler.adapters import Adapters
from skiff_runtime.scheduler.capture_schedule import CaptureSchedule
from skiff_runtime.scheduler.lora_slots import LoraSlots
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.result_processor import ResultProcessor
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.step_planner import PlannedStep


class StepStatsRecorder:
    """Makes ``StepStats``. It reads clocks, so no scheduling decision may depend on it."""

    def __init__(
        self,
        *,
        pool: PagePool,
        queue: RequestQueue,
        slots: Slots,
        results: ResultProcessor,
        captures: CaptureSchedule,
        lora_slots: LoraSlots,
        adapters: Adapters,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._slots = slots
        self._results = results
        self._captures = captures
        self._lora_slots = lora_slots
        self._adapters = adapters
        self._reported_adapters = {"adapter_reads": 0, "adapter_loads": 0, "adapter_evictions": 0}
        self._reported_evictions = 0
        self._reported_corruptions = 0
        self._busy_since = 0.0
        self._received: list[int] = []

    def record_received(self, uid: int) -> None:
        """Record that the scheduler has received a request: it is queued or running from now on, or has failed."""
        self._received.append(uid)

    def record_idle(self, *, in_flight_tokens: int) -> StepStats:
        """Return the statistics of a moment at which no step has just ended.

        ``in_flight_tokens``: prompt tokens of the steps that are launched and not retired.
        """
        return StepStats(**self._read_gauges(in_flight_tokens))

    def record_step(self, planned: PlannedStep, *, launched_at: float, in_flight_tokens: int) -> StepStats:
        """Return the statistics after a step, which ran from its launch or the end of the step before it.

        ``in_flight_tokens``: prompt tokens of the steps that are launched and not retired.
        """
        ended_at = perf_counter()
        began_at = max(launched_at, self._busy_since)
        self._busy_since = ended_at
        step, started = planned.step, planned.started
        return StepStats(
            **self._read_gauges(in_flight_tokens),
            step_seconds=ended_at - began_at,
            prefill_rows=len(step.slots) - step.decode_rows,
            prefill_tokens=step.num_prompt_tokens,
            decode_tokens=step.decode_rows,
            preempted=planned.preempted,
            lookup_tokens=sum(each.prompt_tokens for each in started if each.is_looked_up),
            hit_tokens=sum(request.cached_tokens for request in started),
            queue_seconds=[launched_at - request.arrived_at for request in started],
        )

    def _read_gauges(self, in_flight_tokens: int) -> dict[str, Any]:
        """Return the gauges, and the evicted pages, corrupted requests and received ones since the last call."""
        pool, queue, results = self._pool, self._queue, self._results
        evicted, self._reported_evictions = pool.evicted_pages - self._reported_evictions, pool.evicted_pages
        corrupted, self._reported_corruptions = (
            results.corrupted - self._reported_corruptions,
            results.corrupted,
        )
        received, self._received = self._received, []
        return {
            "queued": len(queue),
            "queued_tokens": queue.tokens,
            "queued_uncached_tokens": queue.uncached_tokens,
            "running": self._slots.num_running,
            "pages_total": pool.total_pages,
            "pages_free": pool.free_pages,
            "pages_cached": pool.cache.evictable_pages,
            "page_size": pool.cache.page_size,
            "evicted_pages": evicted,
            "corrupted": corrupted,
            "graphs_pending": self._captures.num_pending,
            "prefill_tokens_left": in_flight_tokens + self._slots.num_uncomputed_tokens,
            "received": received,
            **self._read_adapters(),
        }

    def _read_adapters(self) -> dict[str, Any]:
        """Return the gauges of LoRA adapters, and what was added to their counters since the last call."""
        slots, before = self._lora_slots, self._reported_adapters
        self._reported_adapters = {
            "adapter_reads": self._adapters.num_reads,
            "adapter_loads": slots.num_loads,
            "adapter_evictions": slots.num_evictions,
        }
        return {
            "running_adapters": slots.used_adapters(),
            "waiting_adapters": self._queue.adapters(),
            "resident_adapters": slots.resident_adapters(),
            **{name: count - before[name] for name, count in self._reported_adapters.items()},
        }
