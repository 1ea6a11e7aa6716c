"""The state of a pod as its events report it: load, readiness, and the prompt blocks in its prefix cache.

Reports lag. So each request sent since the last report counts until a report acknowledges it, or until it ends, for as
long as the pod is expected to compute it. Its prompt counts as cached at once, because a later request with the same
prefix will find it; it stops counting after ``EXPECTED_SECONDS`` without confirmation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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
"""Time in which a request reaches the pod's API process, and its next report this router: by a pod that acknowledges none."""
_READY: Final = "ready"
FULL_KV_CACHE: Final = 0.95
"""Fraction from which on a waiting request waits for the end of another one."""
MEAN_WEIGHT: Final = 0.05
"""Weight of the newest request in the moving average of uncached tokens."""
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


class _UnacknowledgedRequest(NamedTuple):
    """A request that no report includes. ``tokens``: those that are not cached."""

    sent_at: float
    tokens: int


class PodState:
    """The reports of one pod. Without a stream of events, ``load`` is None and no block counts as cached."""

    def __init__(self) -> None:
        self.load: PodLoad | None = None
        self.isolates_keys = False
        self.adapters: PodAdapters | None = None
        """None if it is not known which LoRA adapters the pod has."""
        self.prompt_blocks: set[int] = set()
        """Reported as cached, or expected to be when a further request runs."""
        self.acknowledges = False
        """Its reports list the requests of this router that they include."""
        self.unacknowledged_tokens = 0
        """Tokens that the unacknowledged requests will have to compute."""
        self.free_at = 0.0
        """Expected end of the work in the last report and of the requests since, by the clock of the reports."""
        self.reported_tokens = 0.0
        """Tokens to compute that the last report includes."""
        self.first_token_seconds = 0.0
        """Expected seconds of a first token beside its prompt and what is queued: its step, and the wait for a slot."""
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
        self._reported_free_at = 0.0
        self._unacknowledged: dict[int, _UnacknowledgedRequest] = {}
        """By the number of the request, oldest first."""

    @property
    def unacknowledged_requests(self) -> int:
        """Return the number of requests of this router that no report includes."""
        return len(self._unacknowledged)

    @property
    def requests(self) -> int:
        """Return the requests in flight at the pod, from all routers."""
        return self.unacknowledged_requests + (0 if self.load is None else self.load.requests)

    def apply(self, event: StateEvent, now: float) -> None:
        """Apply an event that arrived at ``now``, in seconds of any clock."""
        match event:
            case LoadChanged():
                self.accepts_requests = event.state == _READY
                self._record_load(event.load, now)
                if event.adapters is not None:
                    self.adapters = event.adapters
                for number in event.received:
                    self._drop_unacknowledged(number)
                self.record_report(now)
            case Snapshot():
                self.accepts_requests = event.state == _READY
                self._record_load(event.load, now)
                self.isolates_keys = event.isolates_keys
                self.acknowledges = event.acknowledges
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
        """Record that the last report holds as of ``now``."""
        pending, oldest = self._unacknowledged, now - REPORT_LAG_SECONDS
        while pending and not self.acknowledges and pending[first := next(iter(pending))].sent_at <= oldest:
            self._drop_unacknowledged(first)
        if self._expected:
            self._expire(now)
        self.free_at = max(self._reported_free_at, now) + self._estimate_seconds(self.unacknowledged_tokens)
        self._update_unacknowledged()

    def _expire(self, now: float) -> None:
        """Expect no longer what should have been reported."""
        expected, oldest = self._expected, now - EXPECTED_SECONDS
        while expected and expected[block := next(iter(expected))] <= oldest:
            del expected[block]
            self.prompt_blocks.discard(block)

    def record_prompt(self, now: float, prompt: Prompt, number: int) -> int:
        """Record a request that is sent at ``now``, by its prompt and its number. Return how many of its first blocks are cached here."""
        if self.load is None:
            return 0  # no report would ever include it
        cached = self.count_cached_blocks(prompt.blocks)
        self.record_request(now, prompt.count_uncached_tokens(cached), number)
        if len(self.prompt_blocks) < MAX_PROMPT_BLOCKS:
            for block in prompt.blocks[cached:]:
                if block not in self.prompt_blocks:
                    self._expected[block] = now
                    self.prompt_blocks.add(block)
        return cached

    def record_request(self, now: float, tokens: int, number: int) -> None:
        """Record a request that is sent at ``now`` and has ``tokens`` that are not cached at the pod."""
        if self.load is None:
            return  # no report would ever include it
        self._unacknowledged[number] = _UnacknowledgedRequest(now, tokens)
        self.unacknowledged_tokens += tokens
        self.free_at = max(self.free_at, now) + self._estimate_seconds(tokens)
        self._mean_tokens += MEAN_WEIGHT * (tokens - self._mean_tokens)
        self._update_unacknowledged()

    def forget_request(self, number: int) -> None:
        """Forget a request that has ended; no-op if a report has included it."""
        if number in self._unacknowledged:
            self.free_at -= self._estimate_seconds(self._unacknowledged[number].tokens)
            self._drop_unacknowledged(number)
            self._update_unacknowledged()

    def _drop_unacknowledged(self, number: int) -> None:
        request = self._unacknowledged.pop(number, None)
        if request is not None:
            self.unacknowledged_tokens -= request.tokens

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
        running_seconds = RUNNING_WEIGHT * load.running * load.step_seconds
        self._reported_free_at = now + self._estimate_seconds(tokens) + running_seconds

    def _estimate_seconds(self, tokens: float) -> float:
        """Return the seconds in which the pod computes ``tokens`` of prompts."""
        load = self.load
        if load is None:
            return 0.0
        return tokens * (load.prefill_token_seconds + load.step_seconds / max(1, load.max_step_tokens))

    def _update_unacknowledged(self) -> None:
        """Compute what depends on the requests since the last report."""
        load = self.load
        if load is None:
            return
        self.is_full = load.requests + self.unacknowledged_requests >= load.max_requests
        seconds = load.step_seconds
        in_flight = load.requests + self.unacknowledged_requests
        beyond = in_flight + 1 - load.max_running
        if load.kv_cache_usage > FULL_KV_CACHE and load.waiting:
            beyond = max(beyond, in_flight - load.running + 1)
        if beyond > 0:
            seconds += beyond * load.finish_seconds
        self.first_token_seconds = seconds

    def forget(self) -> None:
        """Forget everything: the stream of events has ended."""
        self.load = self.adapters = None
        self.prompt_blocks = set()
        self._expected.clear()
        self.free_at = self._reported_free_at = self.first_token_seconds = self.token_seconds = 0.0
        self.accepts_requests, self.is_full = True, False
        self.acknowledges = False
        self._unacknowledged.clear()
        self.unacknowledged_tokens = 0

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
