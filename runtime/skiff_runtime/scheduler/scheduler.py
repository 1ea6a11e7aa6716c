"""The scheduler's loop, with overlap scheduling: while the engine runs one step, plan and launch the next.

A step can be planned before the results of the one before it are known, because the engine reads its input
tokens on the device. Only the end of a request by its tokens (end of sequence, a stop token) is noticed one
step late; the extra token is dropped.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

import numpy as np

from skiff_runtime.config import Config
from skiff_runtime.errors import InternalError
from skiff_runtime.kvcache.naive import NaiveCache
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import PrefixCache
from skiff_runtime.kvcache.radix import RadixCache
from skiff_runtime.messages import (
    AbortRequest,
    AdapterRead,
    FlushCache,
    Flushed,
    GenerateRequest,
    LoadAdapter,
    UnloadAdapter,
    WatchCache,
)
from skiff_runtime.scheduler.active_requests import ActiveRequests
from skiff_runtime.scheduler.adapter_store import AdapterStore
from skiff_runtime.scheduler.adapters import Adapters
from skiff_runtime.scheduler.capture_schedule import CaptureSchedule
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.kv_cache_manager import KVCacheManager
from skiff_runtime.scheduler.lockstep_checksum import LockstepChecksum
from skiff_runtime.scheduler.lora_slots import LoraSlots
from skiff_runtime.scheduler.request import RequestLimits
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.result_processor import ResultProcessor
from skiff_runtime.scheduler.schedule_policy import OVERTAKING_BATCHES, make_schedule_policy
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.step_planner import PlannedStep, StepPlanner
from skiff_runtime.scheduler.step_stats import StepStatsRecorder
from skiff_runtime.scheduler.token_batch_builder import TokenBatchBuilder
from skiff_runtime.step import StepEngine, StepHandle

NO_ERRORS: Final[Mapping[int, str]] = {}


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step that has not retired."""

    planned: PlannedStep
    handle: StepHandle
    launched_at: float


class Scheduler:
    """Decides what the engine computes. Each rank has one, and all of them decide the same, in lockstep."""

    def __init__(
        self,
        config: Config,
        *,
        eos_token_ids: tuple[int, ...],
        num_pages: int,
        engine: StepEngine,
        channel: Channel,
        num_deferred_graphs: int = 0,
        adapter_store: AdapterStore | None = None,
        adapters: Sequence[LoadAdapter] = (),
        adapter_errors: Mapping[int, str] = NO_ERRORS,
    ) -> None:
        """Make the scheduler of a resolved ``config`` over the ``num_pages`` of the engine's KV pool.

        ``num_deferred_graphs`` is the number of CUDA graphs that the engine captures as the plans say. ``adapter_store``:
        the engine's LoRA adapters, with ``--enable-lora``; ``adapters``: those that it has read at the start, except those with
        ``adapter_errors``.
        """
        assert config.max_model_len is not None
        self._engine = engine
        self._channel = channel
        self._overlap = not config.disable_overlap_schedule
        self._checks_when_idle = config.log_level == "debug"
        self._cache: PrefixCache
        self._cache = cache = (NaiveCache if config.disable_radix_cache else RadixCache)(config.page_size)
        self._pool = pool = PagePool(num_pages, cache)
        self._slots = slots = Slots(
            count=config.running_limit,
            max_tokens=config.max_model_len,
            max_pages=-(-config.max_model_len // config.page_size),
        )
        self._queue = queue = RequestQueue()
        self._kv_cache = kv_cache = KVCacheManager(pool, slots)
        self._replies = replies = TokenBatchBuilder()
        lora_slots = LoraSlots(config.max_loras if config.enable_lora else 0)
        self._adapters = Adapters(
            slots=lora_slots,
            host_limit=config.max_cpu_loras or config.max_loras,
            max_overtaken=OVERTAKING_BATCHES * config.running_limit,
            queue=queue,
            pool=pool,
            replies=replies,
            store=adapter_store,
        )
        self._adapters.preload(adapters, adapter_errors)
        self._requests = ActiveRequests(
            config,
            limits=RequestLimits(config.max_model_len, num_pages * config.page_size),
            queue=queue,
            slots=slots,
            kv_cache=kv_cache,
            replies=replies,
            adapters=self._adapters,
        )
        policy = make_schedule_policy(config.schedule_policy, queue, cache, max_running=config.running_limit)
        self._planner = StepPlanner(
            config, slots=slots, queue=queue, policy=policy, kv_cache=kv_cache, adapters=self._adapters
        )
        self._results = ResultProcessor(eos_token_ids=eos_token_ids, slots=slots, replies=replies)
        self._captures = CaptureSchedule(num_deferred_graphs)
        self._stats = StepStatsRecorder(
            pool=pool,
            queue=queue,
            slots=slots,
            results=self._results,
            captures=self._captures,
            lora_slots=lora_slots,
            adapters=self._adapters,
        )
        self._checksum = LockstepChecksum()
        self._checksum.add_refused_adapters(sorted(adapter_errors))
        self._in_flight: deque[InFlightStep] = deque()
        self._should_stop = False
        self._needs_check = True

    @property
    def is_idle(self) -> bool:
        """True when nothing is queued, running or in flight."""
        return not (self._in_flight or len(self._queue) or self._slots.num_occupied)

    @property
    def _only_waits_for_adapters(self) -> bool:
        """True when all requests are held back until an adapter has been read."""
        return not (
            self._in_flight or self._queue.num_ready or self._slots.num_occupied or self._adapters.has_changed
        )

    @property
    def num_pending_captures(self) -> int:
        """Number of CUDA graphs that are still to be captured while steps run."""
        return self._captures.num_pending

    @property
    def checksum(self) -> int:
        """Lockstep checksum of everything planned and retired; equal on all ranks after each turn."""
        return self._checksum.value

    def turn(self) -> bool:
        """Run one turn of the loop; return False once shut down, with no step left in flight."""
        idle = self.is_idle
        if idle and self._checks_when_idle and self._needs_check:
            self.check()
            self._needs_check = False
        can_proceed = (
            self._captures.num_pending
            or self._cache.has_pending_events
            or self._adapters.has_changed
            or not self._replies.is_empty
        )
        wait = not can_proceed and (idle or self._only_waits_for_adapters)
        for item in self._channel.receive(wait=wait, checksum=self.checksum):
            self._take(item)
        self._requests.free_ended()
        self._adapters.advance()
        if self._in_flight and self._replies.has_answers:
            self._send_replies()  # before the wait for a step, which may take seconds on a CPU
        if self._planner.is_out_of_pages():
            self._retire_until(0)  # its end may free pages; a plan that preempts must find nothing in flight
        launched = not self._should_stop and self._launch()
        self._retire_until(1 if launched and self._overlap else 0)
        if not self._replies.is_empty or self._cache.has_pending_events:
            self._send_replies()
        return not self._should_stop

    def check(self) -> None:
        """Assert that every page is exactly one of free, cached and owned by a request."""
        pending = [page for step in self._in_flight for page in step.planned.duplicates]
        self._pool.check(np.concatenate([self._kv_cache.owned_pages(), *pending]))
        self._adapters.check(self._slots.requests())

    def _take(self, item: SchedulerInput) -> None:
        self._needs_check = True
        if isinstance(item, GenerateRequest):
            self._stats.record_received(item.uid)
            self._requests.accept(item)
        elif isinstance(item, AbortRequest):
            self._requests.abort(item)
        elif isinstance(item, FlushCache):
            self._flush(item.uid)
        elif isinstance(item, LoadAdapter):
            self._adapters.load(item)
        elif isinstance(item, UnloadAdapter):
            self._adapters.unload(item)
        elif isinstance(item, AdapterRead):
            error = InternalError(f"the adapter could not be read again: {item.error}")
            self._requests.fail_waiting(self._adapters.finish_read(item), error)
        elif isinstance(item, WatchCache):
            self._cache.watch(prompts=item.prompts, blocks=item.blocks, tokens=item.tokens)
        else:
            self._should_stop = True

    def _flush(self, uid: int) -> None:
        pages = self._pool.flush()
        self._checksum.add_flushed_pages(pages)
        self._replies.add_flush(Flushed(uid=uid, pages=len(pages), running=self._slots.num_occupied))

    def _launch(self) -> bool:
        """Plan and launch the next step, or a capture; return False when there is nothing to compute for a request."""
        planned = self._planner.plan()
        if planned is None:
            if self.is_idle and self._captures.take_idle():
                self._launch_step(self._planner.plan_capture(), captures_graph=True)
            return False
        started_at = perf_counter()
        for request in planned.started:
            self._replies.add_opened(request, started_at)
        self._launch_step(planned, captures_graph=self._captures.take_busy())
        return True

    def _launch_step(self, planned: PlannedStep, *, captures_graph: bool) -> None:
        if captures_graph:
            planned = replace(planned, step=replace(planned.step, captures_graph=True))
        self._checksum.add_plan(planned.step)
        launched_at = perf_counter()
        self._in_flight.append(InFlightStep(planned, self._engine.launch(planned.step), launched_at))

    def _retire_until(self, count: int) -> None:
        """Retire the oldest steps until at most ``count`` are in flight."""
        while len(self._in_flight) > count:
            self._retire(self._in_flight.popleft())

    def _retire(self, in_flight: InFlightStep) -> None:
        """Wait for a step, apply its tokens, free what only this step still used, and send the results."""
        step = in_flight.planned.step
        result = in_flight.handle.result()
        self._checksum.add_tokens(result.tokens)
        self._slots.count_retirement(step.slots)
        self._requests.end_slots(self._results.process(step.slots[step.samples], result))
        for pages in in_flight.planned.duplicates:
            self._pool.free(pages)
        self._requests.free_ended()
        stats = self._stats.record_step(
            in_flight.planned,
            launched_at=in_flight.launched_at,
            in_flight_tokens=self._count_in_flight_tokens(),
        )
        self._channel.send(self._replies.take(stats, self._cache.take_events()))

    def _send_replies(self) -> None:
        """Send what was gathered although no step has just ended."""
        stats = self._stats.record_idle(in_flight_tokens=self._count_in_flight_tokens())
        self._channel.send(self._replies.take(stats, self._cache.take_events()))

    def _count_in_flight_tokens(self) -> int:
        """Return the prompt tokens of the steps that are launched and not retired."""
        return sum(each.planned.step.num_prompt_tokens for each in self._in_flight)
