"""The schedule policy (``--schedule-policy``): the order in which waiting requests are admitted.

``fcfs`` takes them in the order of their queue keys; ``lpm`` takes the longest cached prefix first, so that
requests with a common prefix run together and read it once. Policies decide by queue keys, counts and the
cache, never by time, so all ranks decide the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Final

from skiff_runtime.kvcache.prefix_cache import PrefixCache
from skiff_runtime.scheduler.request import NO_SLOT, Request
from skiff_runtime.scheduler.request_queue import RequestQueue

LOOKUP_WINDOW: Final = 1024
"""``lpm`` compares the cached prefixes of this many requests at the head of the queue."""
MIN_LOOKUPS_PER_STEP: Final = 64
TOKENS_PER_LOOKUP: Final = 16
"""One plan looks up MIN_LOOKUPS_PER_STEP prefixes, and one more for each TOKENS_PER_LOOKUP tokens of the step
before, which hides the time: a lookup takes 4 us for 2,000 tokens."""
OVERTAKING_BATCHES: Final = 4
"""Bound on overtaking: at most OVERTAKING_BATCHES x max_running requests with longer cached prefixes may run before
an older one."""


class SchedulePolicy(ABC):
    """The order in which requests leave the queue."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    def record_plan(self, tokens: int) -> None:  # noqa: B027 (not every policy needs it)
        """Note that a step of this many tokens has been planned."""

    @abstractmethod
    def candidates(self) -> Iterator[Request]:
        """Yield the waiting requests in the order of admission.

        The caller takes each request out of the queue, or has it held back, before it requests the next one.
        """


class FcfsPolicy(SchedulePolicy):
    """First come, first served: the order of queue keys."""

    def candidates(self) -> Iterator[Request]:
        while first := self._queue.first(1):
            yield first[0]


class LpmPolicy(SchedulePolicy):
    """Longest prefix match among the requests of the most urgent priority that waits, within the lookup window."""

    def __init__(self, queue: RequestQueue, cache: PrefixCache, *, max_running: int) -> None:
        super().__init__(queue)
        self._cache = cache
        self._max_overtaken = OVERTAKING_BATCHES * max_running
        self._max_lookups = LOOKUP_WINDOW  # before the first step there is nothing to delay

    def record_plan(self, tokens: int) -> None:
        self._max_lookups = MIN_LOOKUPS_PER_STEP + tokens // TOKENS_PER_LOOKUP

    def candidates(self) -> Iterator[Request]:
        while first := self._queue.first(LOOKUP_WINDOW):
            _, same_priority = next(groupby(first, key=attrgetter("priority")))
            requests = list(same_priority)
            self._look_up(requests)
            yield from self._sort(requests)

    def _sort(self, left: list[Request]) -> Iterator[Request]:
        """Yield requests that were overtaken often enough, then the longest prefix first; ties by queue key."""
        lengths = [each.num_cached_pages for each in left]
        while left:
            due = (index for index, each in enumerate(left) if each.times_overtaken >= self._max_overtaken)
            chosen = next(due, lengths.index(max(lengths)))
            yield left[chosen]
            # Reached only if the chosen request was admitted or is held back: one that is refused overtakes nothing.
            if left[chosen].slot != NO_SLOT:
                for each in left[:chosen]:
                    each.times_overtaken += 1
            del left[chosen], lengths[chosen]

    def _look_up(self, waiting: list[Request]) -> None:
        """Update the cached prefix lengths that a change of the cache made stale, the stalest first."""
        stale = [each for each in waiting if each.cache_version != self._cache.version]
        for each in sorted(stale, key=attrgetter("cache_version"))[: self._max_lookups]:
            each.cache_version = self._cache.version
            each.num_cached_pages = self._cache.count_cached_pages(each.cacheable_tokens, salt=each.salt)


def make_schedule_policy(
    name: str, queue: RequestQueue, cache: PrefixCache, *, max_running: int
) -> SchedulePolicy:
    """Make the policy that ``--schedule-policy`` names; at most ``max_running`` requests run at a time."""
    return LpmPolicy(queue, cache, max_running=max_running) if name == "lpm" else FcfsPolicy(queue)
