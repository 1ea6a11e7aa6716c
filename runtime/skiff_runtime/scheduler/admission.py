"""How much memory running requests will still want: an estimate, never a reservation.

Most requests end long before ``max_tokens``. A share of what they may still produce is
expected of them; it shrinks while all goes well and grows when memory ran out and a
request had to be retracted (the scheme that SGLang introduced).
"""

import math
from typing import Final

import numpy as np

from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Slots

INITIAL_SHARE: Final = 0.7
LEAST_SHARE: Final = 0.1
DECAY_STEPS: Final = 600
"""Steps without retraction in which the share falls from the initial to the least."""
RAISE: Final = 0.1
"""What a retraction adds to the share at least."""
MOST_EXPECTED: Final = 512
"""Output tokens of which the share is expected: who names no limit seldom writes more."""
STEPS_AHEAD: Final = 32
"""A retraction must at least make room for so many further steps of all."""


class Admission:
    """Decides whether one more request fits beside those that run."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.share = INITIAL_SHARE

    def expected(self, slots: Slots) -> int:
        """Pages that all running requests are expected to want, beyond those that they hold."""
        rows = np.flatnonzero(slots.alive)
        reached = np.maximum(slots.computed[rows], slots.prompts[rows])
        tokens = reached + self.share * np.minimum(slots.unplanned[rows], MOST_EXPECTED)
        missing = np.ceil(tokens / self._page_size) - slots.held[rows]
        return int(np.maximum(missing, 0).sum())

    def expected_of(self, slot: int, slots: Slots) -> int:
        """The share of one of them in ``expected``."""
        reached = max(int(slots.computed[slot]), int(slots.prompts[slot]))
        return max(0, self._pages(reached, int(slots.unplanned[slot])) - int(slots.held[slot]))

    def fits(self, request: Request, *, cached_pages: int, available_pages: int, expected: int) -> bool:
        """Whether it, too, is expected to find its pages among the available when others want ``expected``."""
        return (
            expected + self._pages(len(request.tokens), request.remaining) - cached_pages <= available_pages
        )

    def _pages(self, reached: int, remaining: int) -> int:
        return math.ceil((reached + self.share * min(remaining, MOST_EXPECTED)) / self._page_size)

    def after_step(self) -> None:
        """A step went by in which all found their memory."""
        self.share = max(LEAST_SHARE, self.share - (INITIAL_SHARE - LEAST_SHARE) / DECAY_STEPS)

    def after_retraction(self, slots: Slots) -> None:
        """Too much was admitted: expect of each at least what the running ones have shown."""
        rows = np.flatnonzero(slots.alive)
        left = int(slots.unsent[rows].sum())
        allowed = sum(slots.request(int(slot)).sampling.max_tokens for slot in rows)
        shown = (allowed - left + STEPS_AHEAD * len(rows)) / max(allowed, 1)
        self.share = min(1.0, max(self.share + RAISE, shown))
