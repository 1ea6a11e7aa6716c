"""A pod of the simulated cluster: the project's own radix cache and page pool, and steps that take an H200's time.

The scheduler is reduced to what decides about latency: first come, first served; chunked prefill beside decoding rows under
one token budget; admission by slots and pages. A request's pages for its whole output are allocated at once, so nothing is
preempted. Runs of decode steps without prompts are one event.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from skiff_runtime.api.dispatch.step_time import StepTimeModel
from skiff_runtime.bench.routing.sessions import BYTES_PER_TOKEN, SimulatedRequest
from skiff_runtime.bench.routing.step_times import StepTimes
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import Int32, PrefixHandle
from skiff_runtime.kvcache.radix import RadixCache
from skiff_runtime.messages import StepStats
from skiff_runtime.prompt_blocks import HASH_DTYPE
from skiff_runtime.scheduler.request import locate_prompt_blocks
from skiff_runtime.state_events import PodLoad, PromptBlocksChanged

PAGE_SIZE: Final = 16
MAX_DECODE_RUN: Final = 64
"""Decode steps in one event; a shorter run has its end in sight of the first request that finishes."""


@dataclass(eq=False, slots=True)
class _Running:
    """An admitted request. ``row``: its pages; ``computed``: prompt tokens whose KV is in memory, or planned to be."""

    request: SimulatedRequest
    handle: PrefixHandle
    row: Int32
    computed: int
    blocks: tuple[tuple[int, int], ...]
    noted: int = 0
    chunk: int = 0


@dataclass(slots=True)
class _Step:
    """What runs now. ``decode_steps``: their number if there are no prompts in it; ``began_at``: its start."""

    began_at: float
    ends_at: float
    decode_steps: int
    prefilling: list[_Running] = field(default_factory=list)


class SimulatedPod:
    """One pod. The simulation calls ``submit`` and ``end_step``, and reads when the step at hand ends."""

    def __init__(
        self, *, kv_tokens: int, max_running: int, max_step_tokens: int, times: StepTimes | None = None
    ) -> None:
        self.cache = RadixCache(PAGE_SIZE)
        self.cache.watch(prompts=True, blocks=False)
        self.cache.take_events()
        self._pool = PagePool(kv_tokens // PAGE_SIZE, self.cache)
        self._times = times or StepTimes()
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[_Running] = deque()
        self._finishes: list[tuple[int, int, _Running]] = []
        self._decoded = 0
        self._serial = 0
        self._kv_tokens = 0
        self._step: _Step | None = None
        self._model = StepTimeModel()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def step_ends_at(self) -> float | None:
        """Return when the step at hand ends; None while the pod is idle."""
        return None if self._step is None else self._step.ends_at

    @property
    def requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._waiting) + len(self._prefilling) + len(self._finishes)

    def count_uncached(self, request: SimulatedRequest) -> int:
        """Return the prompt tokens of a request that are not cached here."""
        return len(request.prompt) - self.cache.count_cached_pages(request.prompt[:-1]) * PAGE_SIZE

    def submit(self, request: SimulatedRequest, now: float) -> None:
        """Accept a request. It is planned with the next step; a run of decode steps ends after the one at hand."""
        self._waiting.append(request)
        step = self._step
        if step is None:
            self._begin(now)
        elif not step.prefilling and step.decode_steps > 1:
            rows, elapsed = len(self._finishes), now - step.began_at
            count = self._times.count_decode_steps(rows, self._kv_tokens, elapsed, step.decode_steps)
            step.decode_steps = count
            step.ends_at = step.began_at + self._times.decode_run(rows, self._kv_tokens, count)

    def end_step(self, now: float) -> list[SimulatedRequest]:
        """End the step at hand, begin the next one, and return the requests that have ended."""
        step = self._step
        assert step is not None
        rows, seconds = len(self._finishes), now - step.began_at
        self._record(step, rows, seconds)
        if rows:
            self._decoded += step.decode_steps
            self._kv_tokens += rows * step.decode_steps
        for each in step.prefilling:
            if each.computed == len(each.request.prompt):
                self._prefilling.remove(each)
                each.request.first_token_at = now
                self._serial += 1
                end = self._decoded + len(each.request.output) - 1
                heappush(self._finishes, (end, self._serial, each))
                self._kv_tokens += len(each.request.prompt)
        ended = []
        while self._finishes and self._finishes[0][0] <= self._decoded:
            each = heappop(self._finishes)[2]
            self._kv_tokens -= len(each.request.prompt) + len(each.request.output) - 1
            self._finish(each)
            ended.append(each.request)
        if ended:
            self._model.record_finishes(len(ended), now, others_wait=bool(self._waiting))
        self._begin(now)
        return ended

    def read_load(self) -> PodLoad:
        """Return the load as the pod's API process publishes it."""
        pool, model = self._pool, self._model
        used = pool.total_pages - pool.free_pages - self.cache.evictable_pages
        return PodLoad(
            requests=self.requests,
            max_requests=self._max_running + 10_000,
            waiting=len(self._waiting),
            running=len(self._prefilling) + len(self._finishes),
            max_running=self._max_running,
            queued_tokens=sum(self.count_uncached(each) for each in self._waiting),
            prefill_tokens=self._count_prefill_tokens() + self._count_chunks(),
            kv_cache_usage=used / pool.total_pages,
            step_seconds=model.step_seconds,
            prefill_token_seconds=model.prefill_token_seconds,
            max_step_tokens=self._max_step_tokens,
            finish_seconds=model.finish_seconds,
            bytes_per_token=float(BYTES_PER_TOKEN),
        )

    def take_prompt_events(self) -> PromptBlocksChanged | None:
        """Return the changes of cached prompt blocks since the last call."""
        events = self.cache.take_events()
        if events is None:
            return None
        stored, removed = (
            np.frombuffer(data, HASH_DTYPE).tolist()
            for data in (events.prompts_stored, events.prompts_removed)
        )
        return PromptBlocksChanged(stored=stored, removed=removed)

    def predict_first_token(self, request: SimulatedRequest, now: float) -> float:
        """Return the exact seconds until the first token if nothing else arrives, for an oracle.

        Exact but for the growth of contexts in the meantime, and for slots and pages that are missing.
        """
        times, rows = self._times, len(self._finishes)
        step = self._step
        left = self._count_prefill_tokens()
        for each in self._waiting:
            left += self.count_uncached(each)
        tokens = left + self.count_uncached(request)
        seconds = 0.0 if step is None else self._remaining(step, now)
        steps = -(-tokens // max(1, self._max_step_tokens - rows))
        seconds += steps * times.mixed(rows, self._kv_tokens, 0, 0) + times.prompt_token * tokens
        beyond = rows + len(self._prefilling) + len(self._waiting) + 1 - self._max_running
        return seconds + max(0, beyond) * self._model.finish_seconds

    def _remaining(self, step: _Step, now: float) -> float:
        if step.prefilling or step.decode_steps <= 1:
            return step.ends_at - now
        rows = len(self._finishes)
        count = self._times.count_decode_steps(rows, self._kv_tokens, now - step.began_at, step.decode_steps)
        return step.began_at + self._times.decode_run(rows, self._kv_tokens, count) - now

    def _count_prefill_tokens(self) -> int:
        return sum(len(each.request.prompt) - each.computed for each in self._prefilling)

    def _count_chunks(self) -> int:
        """Return the prompt tokens of the step at hand."""
        return 0 if self._step is None else sum(each.chunk for each in self._step.prefilling)

    def _begin(self, now: float) -> None:
        """Plan and begin the next step, if there is anything to compute."""
        rows = len(self._finishes)
        budget = self._max_step_tokens - rows
        self._admit(budget)
        chunks, pairs, tokens = [], 0, 0
        for each in self._prefilling:
            if budget <= 0:
                break
            each.chunk = min(budget, len(each.request.prompt) - each.computed)
            pairs += each.chunk * (2 * each.computed + each.chunk) // 2
            tokens += each.chunk
            budget -= each.chunk
            each.computed += each.chunk
            self._cache_prefix(each, each.request.prompt, each.computed)
            chunks.append(each)
        if chunks:
            seconds = self._times.mixed(rows, self._kv_tokens, tokens, pairs)
            self._step = _Step(now, now + seconds, 1, chunks)
        elif rows:
            count = min(MAX_DECODE_RUN, self._finishes[0][0] - self._decoded)
            self._step = _Step(now, now + self._times.decode_run(rows, self._kv_tokens, count), count)
        else:
            self._step = None

    def _admit(self, budget: int) -> None:
        """Give slots and pages to the first waiting requests, up to the number that the next step can begin to compute."""
        planned = self._count_prefill_tokens()
        while self._waiting and planned < budget:
            if len(self._prefilling) + len(self._finishes) >= self._max_running:
                return
            request = self._waiting[0]
            match = self.cache.match(request.prompt[:-1])
            self.cache.lock(match.handle)
            length = len(request.prompt) + len(request.output)
            need = -(-length // PAGE_SIZE) - match.handle.depth
            if need > self._pool.available_pages:
                self.cache.unlock(match.handle)
                return
            self._waiting.popleft()
            row = np.concatenate([match.pages, self._pool.allocate(need)])
            cached = match.handle.depth * PAGE_SIZE
            request.cached_tokens = cached
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += cached
            blocks = locate_prompt_blocks(request.blocks, len(request.prompt), PAGE_SIZE)
            self._prefilling.append(_Running(request, match.handle, row, cached, blocks))
            planned += len(request.prompt) - cached

    def _cache_prefix(self, running: _Running, tokens: Int32, computed: int) -> None:
        """Insert the whole pages of what is computed into the cache, and note the prompt blocks in them."""
        whole = computed // PAGE_SIZE
        inserted = self.cache.insert(tokens[: whole * PAGE_SIZE], running.row[:whole], after=running.handle)
        self.cache.lock(inserted.handle)
        self.cache.unlock(running.handle)
        running.handle = inserted.handle
        if len(inserted.columns):
            self._pool.free(running.row[inserted.columns])
            running.row[inserted.columns] = inserted.pages
        end = running.noted
        while end < len(running.blocks) and running.blocks[end][0] < whole:
            end += 1
        self.cache.note_prompt_blocks(running.handle, running.blocks[running.noted : end])
        running.noted = end

    def _finish(self, running: _Running) -> None:
        request = running.request
        tokens = np.concatenate([request.prompt, request.output])
        self._cache_prefix(running, tokens, len(tokens) - 1)
        self._pool.free(running.row[running.handle.depth :])
        self.cache.unlock(running.handle)

    def _record(self, step: _Step, rows: int, seconds: float) -> None:
        if step.prefilling:
            stats = StepStats(step_seconds=seconds, prefill_tokens=self._count_chunks(), decode_tokens=rows)
            self._model.record(stats)
            return
        each_seconds = StepStats(step_seconds=seconds / step.decode_steps, decode_tokens=rows)
        for _ in range(step.decode_steps):
            self._model.record(each_seconds)
