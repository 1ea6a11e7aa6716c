"""How much memory running requests will still want: an estimate, never a reservation.

Most requests end long before ``max_tokens``. A share of what they may still produce is
expected of them; it shrinks while all goes well and grows when memory ran out and a
request had to be preempted (the scheme that SGLang introduced).
"""

import math
from typing import Final

import numpy as np

from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Slots

INITIAL_NEW_TOKEN_RATIO: Final = 0.7
MIN_NEW_TOKEN_RATIO: Final = 0.1
NEW_TOKEN_RATIO_DECAY_STEPS: Final = 600
"""Steps without preemption in which the share falls from the initial to the least."""
MIN_RATIO_INCREASE: Final = 0.1
"""What a preemption adds to the share at least."""
CLIP_MAX_NEW_TOKENS: Final = 512
"""Output tokens of which the share is expected: who names no limit seldom writes more."""
PREEMPTION_HEADROOM_STEPS: Final = 32
"""A preemption must at least make room for so many further steps of all."""


class Admission:
    """Decides whether one more request fits beside those that run."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.share = INITIAL_NEW_TOKEN_RATIO

    def expected(self, slots: Slots) -> int:
        """Pages that all running requests are expected to want, beyond those that they hold."""
        rows = np.flatnonzero(slots.alive)
        reached = np.maximum(slots.computed[rows], slots.prompts[rows])
        tokens = reached + self.share * np.minimum(slots.num_unplanned_outputs[rows], CLIP_MAX_NEW_TOKENS)
        missing = np.ceil(tokens / self._page_size) - slots.held[rows]
        return int(np.maximum(missing, 0).sum())

    def estimate_pages_of(self, slot: int, slots: Slots) -> int:
        """The share of one of them in ``expected``."""
        reached = max(int(slots.computed[slot]), int(slots.prompts[slot]))
        return max(0, self._pages(reached, int(slots.num_unplanned_outputs[slot])) - int(slots.held[slot]))

    def fits(self, request: Request, *, cached_pages: int, available_pages: int, expected: int) -> bool:
        """Whether it, too, is expected to find its pages among the available when others want ``expected``."""
        return (
            expected + self._pages(len(request.tokens), request.remaining) - cached_pages <= available_pages
        )

    def _pages(self, reached: int, remaining: int) -> int:
        return math.ceil((reached + self.share * min(remaining, CLIP_MAX_NEW_TOKENS)) / self._page_size)

    def decay_ratio(self) -> None:
        """A step went by in which all found their memory."""
        self.share = max(
            MIN_NEW_TOKEN_RATIO,
            self.share - (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / NEW_TOKEN_RATIO_DECAY_STEPS,
        )

    def raise_ratio(self, slots: Slots) -> None:
        """Too much was admitted: expect of each at least what the running ones have shown."""
        rows = np.flatnonzero(slots.alive)
        left = int(slots.unsent[rows].sum())
        allowed = sum(slots.request(int(slot)).sampling.max_tokens for slot in rows)
        shown = (allowed - left + PREEMPTION_HEADROOM_STEPS * len(rows)) / max(allowed, 1)
        self.share = min(1.0, max(self.share + MIN_RATIO_INCREASE, shown))
