"""Which of the waiting requests run next: in the order of their places, or with the longest cached prefix first."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Final

from skiff_runtime.kvcache.prefix_cache import PrefixCache
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.request_queue import RequestQueue

LOOKUP_WINDOW: Final = 1024
"""Foremost requests whose cached prefixes are compared."""
MIN_LOOKUPS_PER_STEP: Final = 64
TOKENS_PER_LOOKUP: Final = 16
"""A plan looks up so many of them, and one more for so many tokens of the step before it, which hides the time."""
OVERTAKING_BATCHES: Final = 4
"""So many times as many as run at a time may run before a request from behind it, because their prefixes are longer."""


class SchedulePolicy(ABC):
    """Decides by places, counts and the cache, never by time, so that all ranks decide the same."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    def planned(self, tokens: int) -> None:  # noqa: B027 (not every order heeds it)
        """A step of so many tokens is planned."""

    @abstractmethod
    def candidates(self) -> Iterator[Request]:
        """Whose turn it is, one after another.

        Who asks for the next one has admitted the last one, and taken it out of the queue.
        """


class FcfsPolicy(SchedulePolicy):
    """In the order of places."""

    def candidates(self) -> Iterator[Request]:
        while foremost := self._queue.foremost(1):
            yield foremost[0]


class LpmPolicy(SchedulePolicy):
    """Of the foremost requests of one priority, the one with the longest cached prefix."""

    def __init__(self, queue: RequestQueue, cache: PrefixCache, *, running: int) -> None:
        """``running`` requests at most run at a time."""
        super().__init__(queue)
        self._cache = cache
        self._most_passed = OVERTAKING_BATCHES * running
        self._looks = LOOKUP_WINDOW

    def planned(self, tokens: int) -> None:
        self._looks = MIN_LOOKUPS_PER_STEP + tokens // TOKENS_PER_LOOKUP

    def candidates(self) -> Iterator[Request]:
        while foremost := self._queue.foremost(LOOKUP_WINDOW):
            _, alike = next(groupby(foremost, key=attrgetter("priority")))
            some = list(alike)
            self._look_up(some)
            yield from self._sorted(some)

    def _sorted(self, left: list[Request]) -> Iterator[Request]:
        """The longest prefix first, but before it who was passed over often enough; equals by place."""
        depths = [each.depth for each in left]
        while left:
            due = (index for index, each in enumerate(left) if each.passed >= self._most_passed)
            chosen = next(due, depths.index(max(depths)))
            yield left[chosen]
            for each in left[:chosen]:
                each.passed += 1
            del left[chosen], depths[chosen]

    def _look_up(self, waiting: list[Request]) -> None:
        """Learn anew what is cached of those that were not looked up for longest, if the cache has changed since."""
        stale = [each for each in waiting if each.looked_up != self._cache.changes]
        for each in sorted(stale, key=attrgetter("looked_up"))[: self._looks]:
            each.looked_up = self._cache.changes
            each.depth = self._cache.depth(each.cacheable_tokens, salt=each.salt)


def make_schedule_policy(
    name: str, queue: RequestQueue, cache: PrefixCache, *, running: int
) -> SchedulePolicy:
    """What ``--schedule-policy`` names, where ``running`` requests at most run at a time."""
    return LpmPolicy(queue, cache, running=running) if name == "lpm" else FcfsPolicy(queue)
