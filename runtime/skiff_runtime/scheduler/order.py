"""Which of the waiting requests run next: in the order of their places, or with the longest cached prefix first."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Final

from skiff_runtime.kvcache.base import PrefixCache
from skiff_runtime.scheduler.queue import RequestQueue
from skiff_runtime.scheduler.request import Request

LOOKED_UP: Final = 16
"""Foremost requests whose cached prefixes are compared."""
MOST_PASSED: Final = 32
"""How many requests from behind may run before one because their prefixes are longer."""


class QueueOrder(ABC):
    """Decides by places, counts and the cache, never by time, so that all ranks decide the same."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    @abstractmethod
    def candidates(self) -> Iterator[Request]:
        """Whose turn it is, one after another.

        Who asks for the next one has admitted the last one, and taken it out of the queue.
        """


class FirstCome(QueueOrder):
    """In the order of places."""

    def candidates(self) -> Iterator[Request]:
        while foremost := self._queue.foremost(1):
            yield foremost[0]


class LongestPrefix(QueueOrder):
    """Of the foremost requests of one priority, the one with the longest cached prefix."""

    def __init__(self, queue: RequestQueue, cache: PrefixCache) -> None:
        super().__init__(queue)
        self._cache = cache

    def candidates(self) -> Iterator[Request]:
        while foremost := self._queue.foremost(LOOKED_UP):
            _, alike = next(groupby(foremost, key=attrgetter("priority")))
            yield from self._sorted(list(alike))

    def _sorted(self, left: list[Request]) -> Iterator[Request]:
        """The longest prefix first, but before it who was passed over often enough; equals by place."""
        depths = [self._cache.depth(each.matchable, salt=each.salt) for each in left]
        while left:
            due = (index for index, each in enumerate(left) if each.passed >= MOST_PASSED)
            chosen = next(due, depths.index(max(depths)))
            yield left[chosen]
            for each in left[:chosen]:
                each.passed += 1
            del left[chosen], depths[chosen]


def make_order(name: str, queue: RequestQueue, cache: PrefixCache) -> QueueOrder:
    """What ``--queue-order`` names."""
    return LongestPrefix(queue, cache) if name == "prefix" else FirstCome(queue)
