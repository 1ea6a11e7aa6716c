"""A pod as its own events describe it: load, state, and the prompt blocks that its prefix cache holds.

Reports are as old as the last event. So each request that was sent since then counts, too, until a report may include it;
and its prompt counts as cached at once, because a request that follows it to the pod finds it cached. If no report confirms
that in time, it no longer counts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from skiff_runtime.prompt_blocks import DEFAULT_BYTES_PER_TOKEN, PROMPT_BLOCK_BYTES
from skiff_runtime.state_events import (
    KVBlocksChanged,
    LoadChanged,
    PodAdapters,
    PodLoad,
    PromptBlocksChanged,
    Snapshot,
    StateEvent,
)

MAX_PROMPT_BLOCKS: Final = 1 << 17
"""Prompt blocks that are kept of one pod; those of 32 million tokens."""
EXPECTED_SECONDS: Final = 10.0
"""Time after which a prompt that was sent, and is not reported as cached, is expected no longer."""
REPORT_LAG_SECONDS: Final = 0.005
"""Time in which a request reaches the pod's API process, and its next report this router.

A request is counted twice from the first report that includes it until one that is this much younger than the request.
"""
_READY: Final = "ready"
FULL_KV_CACHE: Final = 0.95
"""Fraction from which on a waiting request waits for the end of another one."""
MEAN_WEIGHT: Final = 0.05
"""Of the newest request in the mean of the tokens that a request here has to compute."""
RUNNING_WEIGHT: Final = 0.02
"""Steps by which each running request puts a pod off, since every further one makes the steps of all longer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as the router sees it. ``blocks``: names of its prompt blocks, if the policy reads them."""

    blocks: Sequence[int]
    text_bytes: int
    bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Return the estimated number of tokens."""
        return int(self.text_bytes / self.bytes_per_token)

    def count_cached_tokens(self, cached_blocks: int) -> int:
        """Return the estimated number of tokens in ``cached_blocks`` of its first blocks."""
        return int(cached_blocks * PROMPT_BLOCK_BYTES / self.bytes_per_token)

    def count_uncached_tokens(self, cached_blocks: int) -> int:
        """Return the estimated number of tokens to compute where ``cached_blocks`` of its first blocks are cached."""
        return int((self.text_bytes - cached_blocks * PROMPT_BLOCK_BYTES) / self.bytes_per_token)


NO_PROMPT: Final = Prompt((), 0)


class PodState:
    """The reports of one pod. Without a stream of events, ``load`` is None and no block counts as cached."""

    def __init__(self) -> None:
        self.load: PodLoad | None = None
        self.isolates_keys = False
        self.adapters: PodAdapters | None = None
        """None if it is not known which LoRA adapters the pod has."""
        self.prompt_blocks: set[int] = set()
        """Reported as cached, or expected to be when a further request runs."""
        self.unseen_requests = 0
        """Requests of this router that no report includes."""
        self.unseen_tokens = 0
        """Tokens that these will have to compute."""
        self.free_at = 0.0
        """Expected end of the work in the last report, by the clock of the reports."""
        self.reported_tokens = 0.0
        """Tokens to compute that the last report includes."""
        self.unseen_seconds = 0.0
        """Expected seconds of the work that no report includes, and of the step of a first token."""
        self.token_seconds = 0.0
        """Measured seconds of one prompt token; 0.0 if the pod has not reported them."""
        self.accepts_requests = True
        """The pod reports to be ready, or nothing."""
        self.is_full = False
        """The pod would refuse a request because too many are in flight."""
        self._expected: dict[
            int, float
        ] = {}  # blocks that are not reported, and when they were sent, oldest first
        self._mean_tokens = 0.0
        self._unseen: deque[tuple[float, int]] = deque()

    @property
    def requests(self) -> int:
        """Return the requests in flight at the pod, from all routers."""
        return self.unseen_requests + (0 if self.load is None else self.load.requests)

    def apply(self, event: StateEvent, now: float) -> None:
        """Apply an event that arrived at ``now``, in seconds of any clock."""
        match event:
            case LoadChanged():
                self.accepts_requests = event.state == _READY
                self._record_load(event.load, now)
                if event.adapters is not None:
                    self.adapters = event.adapters
                self.record_report(now)
            case Snapshot():
                self.accepts_requests = event.state == _READY
                self._record_load(event.load, now)
                self.isolates_keys = event.isolates_keys
                self.adapters = event.adapters
                self.prompt_blocks = set(event.prompt_blocks[:MAX_PROMPT_BLOCKS])
                self._expected.clear()
                self.record_report(now)
            case PromptBlocksChanged():
                for block in (*event.removed, *event.stored):
                    self._expected.pop(block, None)
                self.prompt_blocks.difference_update(event.removed)
                if len(self.prompt_blocks) < MAX_PROMPT_BLOCKS:
                    self.prompt_blocks.update(event.stored)
            case KVBlocksChanged():
                pass

    def record_report(self, now: float) -> None:
        """Record that the last report holds as of ``now``: it includes the requests that were sent before."""
        unseen, oldest = self._unseen, now - REPORT_LAG_SECONDS
        while unseen and unseen[0][0] <= oldest:
            self.unseen_requests -= 1
            self.unseen_tokens -= unseen.popleft()[1]
        if self._expected:
            self._expire(now)
        self._update_unseen()

    def _expire(self, now: float) -> None:
        """Expect no longer what should have been reported."""
        expected, oldest = self._expected, now - EXPECTED_SECONDS
        while expected and expected[block := next(iter(expected))] <= oldest:
            del expected[block]
            self.prompt_blocks.discard(block)

    def record_prompt(self, now: float, prompt: Prompt) -> int:
        """Record a request that is sent at ``now``, by its prompt. Return how many of its first blocks are cached here."""
        if self.load is None:
            return 0  # no report would ever include it
        cached = self.count_cached_blocks(prompt.blocks)
        self.record_request(now, prompt.count_uncached_tokens(cached))
        if len(self.prompt_blocks) < MAX_PROMPT_BLOCKS:
            for block in prompt.blocks[cached:]:
                if block not in self.prompt_blocks:
                    self._expected[block] = now
                    self.prompt_blocks.add(block)
        return cached

    def record_request(self, now: float, tokens: int) -> None:
        """Record a request that is sent at ``now`` and has ``tokens`` that are not cached at the pod."""
        if self.load is None:
            return  # no report would ever include it
        self._unseen.append((now, tokens))
        self.unseen_requests += 1
        self.unseen_tokens += tokens
        self._mean_tokens += MEAN_WEIGHT * (tokens - self._mean_tokens)
        self._update_unseen()

    def _record_load(self, load: PodLoad, now: float) -> None:
        """Compute what depends on a report alone."""
        self.load = load
        self.token_seconds = load.prefill_token_seconds
        # Accepted by the pod's API process, and not by its scheduler when that last reported.
        arriving = max(0, load.requests - load.waiting - load.running)
        arriving_tokens: float = arriving * self._mean_tokens
        if load.arriving_tokens is not None:
            arriving_tokens = load.arriving_tokens
        tokens = load.queued_tokens + load.prefill_tokens + arriving_tokens
        self.reported_tokens = tokens
        steps = tokens / max(1, load.max_step_tokens) + RUNNING_WEIGHT * load.running
        self.free_at = now + tokens * load.prefill_token_seconds + steps * load.step_seconds

    def _update_unseen(self) -> None:
        """Compute what depends on the requests since the last report."""
        load = self.load
        if load is None:
            return
        self.is_full = load.requests + self.unseen_requests >= load.max_requests
        tokens = self.unseen_tokens
        steps = 1.0 + tokens / max(1, load.max_step_tokens)
        seconds = tokens * load.prefill_token_seconds + steps * load.step_seconds
        in_flight = load.requests + self.unseen_requests
        beyond = in_flight + 1 - load.max_running
        if load.kv_cache_usage > FULL_KV_CACHE and load.waiting:
            beyond = max(beyond, in_flight - load.running + 1)
        if beyond > 0:
            seconds += beyond * load.finish_seconds
        self.unseen_seconds = seconds

    def forget(self) -> None:
        """Forget everything: the stream of events has ended."""
        self.load = self.adapters = None
        self.prompt_blocks = set()
        self._expected.clear()
        self.free_at = self.unseen_seconds = self.token_seconds = 0.0
        self.accepts_requests, self.is_full = True, False
        self._unseen.clear()
        self.unseen_requests = self.unseen_tokens = 0

    def count_cached_blocks(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are cached. A block is only cached with all those before it."""
        cached = self.prompt_blocks
        if not blocks or blocks[0] not in cached:
            return 0
        low, high = 1, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in cached:
                low = middle
            else:
                high = middle - 1
        return low
