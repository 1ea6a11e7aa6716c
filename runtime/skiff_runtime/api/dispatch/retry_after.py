"""Estimate of Retry-After for requests that are rejected because too many wait, from the rate of completions."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 60
MAX_WAIT_SECONDS: Final = 60


class RetryAfterEstimator:
    """Counts completed choices for each of the last ``WINDOW_SECONDS`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._completions: deque[tuple[int, int]] = deque()  # (second, count), oldest first
        self._total = 0
        self._last_reserved = 0.0  # the time at which the last rejected client should return

    def record_completion(self) -> None:
        """Record that a choice completed now, which frees its capacity."""
        second = int(self._clock())
        self._total += 1
        if self._completions and self._completions[-1][0] == second:
            self._completions[-1] = (second, self._completions[-1][1] + 1)
        else:
            self._completions.append((second, 1))
            self._drop_old(second)

    def rate(self) -> float:
        """Return completions per second, with one added so that the rate is never 0."""
        now = self._clock()
        self._drop_old(int(now))
        observed_seconds = min(now - self._began, WINDOW_SECONDS)
        return (self._total + 1) / max(observed_seconds, 1.0)

    def retry_after_seconds(self) -> int:
        """Return the delay after which a client that is rejected now should retry: 1 to ``MAX_WAIT_SECONDS``.

        Each rejected client reserves the next completion, so that they return one after the other.
        """
        now = self._clock()
        self._last_reserved = min(
            max(self._last_reserved, now) + 1 / self.rate(),
            now + MAX_WAIT_SECONDS,
        )
        # The sum above is rounded, so the difference may exceed the maximum by a little.
        return min(max(1, math.ceil(self._last_reserved - now)), MAX_WAIT_SECONDS)

    def _drop_old(self, second: int) -> None:
        while self._completions and self._completions[0][0] <= second - WINDOW_SECONDS:
            self._total -= self._completions.popleft()[1]
