"""The scheduler's loop: while the engine runs one step, plan and launch the next, then retire the first."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from skiff_runtime.config import Config
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.messages import AbortRequest, FlushCache, Flushed, GenerateRequest
from skiff_runtime.scheduler.active_requests import ActiveRequests
from skiff_runtime.scheduler.channel import Channel, Item
from skiff_runtime.scheduler.kv_cache_manager import Tenancy
from skiff_runtime.scheduler.lockstep_checksum import Digest
from skiff_runtime.scheduler.request import Limits
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.result_processor import ResultProcessor
from skiff_runtime.scheduler.schedule_policy import make_schedule_policy
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.step_planner import Planned, StepPlanner
from skiff_runtime.scheduler.step_stats import Gauges
from skiff_runtime.scheduler.token_batch_builder import Replies
from skiff_runtime.step import StepEngine, StepHandle


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step that has not retired."""

    planned: Planned
    handle: StepHandle
    launched_at: float


class Scheduler:
    """Decides what the engine computes; one a rank, all in lockstep."""

    def __init__(
        self,
        config: Config,
        *,
        eos_token_ids: tuple[int, ...],
        num_pages: int,
        engine: StepEngine,
        channel: Channel,
    ) -> None:
        """``config`` is resolved; ``num_pages`` is the size of the engine's KV pool."""
        assert config.max_model_len is not None
        self._engine = engine
        self._channel = channel
        self._overlap = not config.disable_overlap_schedule
        self._checks = config.log_level == "debug"
        cache = "naive" if config.disable_radix_cache else "radix"
        self._memory = memory = PagePool(num_pages=num_pages, page_size=config.page_size, cache=cache)
        self._slots = slots = Slots(
            count=config.running_limit,
            max_tokens=config.max_model_len,
            max_pages=-(-config.max_model_len // config.page_size),
        )
        limits = Limits(config.max_model_len, num_pages * config.page_size)
        self._queue = queue = RequestQueue()
        self._tenancy = tenancy = Tenancy(memory, slots)
        self._replies = replies = Replies()
        self._registry = ActiveRequests(
            config, limits=limits, queue=queue, slots=slots, tenancy=tenancy, replies=replies
        )
        order = make_schedule_policy(
            config.schedule_policy, queue, memory.cache, running=config.running_limit
        )
        self._batcher = StepPlanner(
            config, memory=memory, slots=slots, queue=queue, order=order, tenancy=tenancy
        )
        self._results = ResultProcessor(eos_token_ids=eos_token_ids, slots=slots, replies=replies)
        self._gauges = Gauges(memory=memory, queue=queue, slots=slots, results=self._results)
        self._digest = Digest()
        self._flights: deque[Flight] = deque()
        self._stopped = False
        self._unchecked = True

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        return not (self._flights or len(self._queue) or self._slots.occupied)

    @property
    def digest(self) -> int:
        """Checksum of all that was planned and retired; equal on all ranks after each turn."""
        return self._digest.value

    def turn(self) -> bool:
        """One turn of the loop; False when it was told to stop, with nothing left in flight."""
        idle = self.idle
        if idle and self._checks and self._unchecked:
            self.check()
            self._unchecked = False
        for item in self._channel.receive(wait=idle, digest=self.digest):
            self._take(item)
        self._registry.release()
        if self._batcher.is_out_of_pages():
            self._retire_down_to(0)
        launched = not self._stopped and self._launch()
        self._retire_down_to(1 if launched and self._overlap else 0)
        if not self._replies.empty:
            self._channel.send(self._replies.take(self._gauges.now()))
        return not self._stopped

    def check(self) -> None:
        """Assert that every page is exactly one of free, cached and owned by a request."""
        pending = [page for flight in self._flights for page in flight.planned.duplicates]
        self._memory.check(np.concatenate([self._tenancy.owned(), *pending]))

    def _take(self, item: Item) -> None:
        self._unchecked = True
        if isinstance(item, GenerateRequest):
            self._registry.accept(item)
        elif isinstance(item, AbortRequest):
            self._registry.abort(item)
        elif isinstance(item, FlushCache):
            self._flush(item.uid)
        else:
            self._stopped = True

    def _flush(self, uid: int) -> None:
        pages = self._memory.flush()
        self._digest.flushed(pages)
        self._replies.flush(Flushed(uid=uid, pages=len(pages), running=self._slots.occupied))

    def _launch(self) -> bool:
        """Plan and start the next step, if there is anything to compute."""
        planned = self._batcher.plan()
        if planned is None:
            return False
        for request in planned.opened:
            self._replies.open(request)
        self._digest.planned(planned.step)
        launched_at = perf_counter()
        self._flights.append(Flight(planned, self._engine.launch(planned.step), launched_at))
        return True

    def _retire_down_to(self, count: int) -> None:
        while len(self._flights) > count:
            self._retire(self._flights.popleft())

    def _retire(self, flight: Flight) -> None:
        """Wait for a step; apply its tokens, free what only it still used, and tell."""
        step = flight.planned.step
        result = flight.handle.result()
        self._digest.retired(result.tokens)
        self._slots.num_in_flight_steps[step.slots] -= 1
        self._registry.end_slots(self._results.apply(step.slots[step.samples], result))
        for pages in flight.planned.duplicates:
            self._memory.free(pages)
        self._registry.release()
        self._channel.send(
            self._replies.take(self._gauges.after(flight.planned, launched_at=flight.launched_at))
        )
