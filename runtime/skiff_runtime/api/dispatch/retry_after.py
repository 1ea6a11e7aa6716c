"""How fast requests end lately, and so when one that is refused now may find a place."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 60
MAX_WAIT_SECONDS: Final = 60


class RetryAfterEstimator:
    """Counts of ended requests, one a second, for the last ``WINDOW_SECONDS``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, int]] = deque()
        self._ended = 0
        self._booked = 0.0

    def record_completion(self) -> None:
        """A request ended, so a place became free."""
        second = int(self._clock())
        self._ended += 1
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + 1)
        else:
            self._seconds.append((second, 1))
            self._forget(second)

    def rate(self) -> float:
        """Requests a second. One more than was seen counts, so that silence is a low rate, not none."""
        now = self._clock()
        self._forget(int(now))
        watched = min(now - self._began, WINDOW_SECONDS)
        return (self._ended + 1) / max(watched, 1.0)

    def wait_seconds(self) -> int:
        """When a client that is refused now should come back: a place each, in the order in which they were refused.

        At least 1, at most ``MAX_WAIT_SECONDS``.
        """
        now = self._clock()
        self._booked = min(max(self._booked, now) + 1 / self.rate(), now + MAX_WAIT_SECONDS)
        return min(max(1, math.ceil(self._booked - now)), MAX_WAIT_SECONDS)  # the sum was rounded

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_SECONDS:
            self._ended -= self._seconds.popleft()[1]
