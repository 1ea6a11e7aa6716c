"""Admission control: an estimate of the KV pages that running requests will still need, instead of a reservation.

Most requests end long before ``max_tokens``, so reserving whole outputs would waste most of the KV cache.
Each running request is expected to produce a share of what it may still produce: the new-token ratio, a
scheme of SGLang's. The ratio decays with every step that finds its memory, and rises when memory ran out
and a request was preempted.
"""

import math
from typing import Final

import numpy as np

from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Slots

INITIAL_NEW_TOKEN_RATIO: Final = 0.7
MIN_NEW_TOKEN_RATIO: Final = 0.1
NEW_TOKEN_RATIO_DECAY_STEPS: Final = 600
"""Steps without a preemption in which the ratio falls from its initial value to its minimum."""
MIN_RATIO_INCREASE: Final = 0.1
"""Least that a preemption adds to the ratio."""
CLIP_MAX_NEW_TOKENS: Final = 512
"""Remaining outputs count up to this many tokens: requests without a limit of their own seldom produce more."""
PREEMPTION_HEADROOM_STEPS: Final = 32
"""After a preemption the ratio covers at least this many further steps of every running request."""


class Admission:
    """Decides whether one more request fits beside those that run."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO

    def estimate_pages(self, slots: Slots) -> int:
        """Return the pages that all running requests are expected to need beyond those that they hold."""
        rows = np.flatnonzero(slots.alive)
        prefilled = np.maximum(slots.num_computed_tokens[rows], slots.num_prefill_tokens[rows])
        outputs = np.minimum(slots.num_unplanned_outputs[rows], CLIP_MAX_NEW_TOKENS)
        tokens = prefilled + self.new_token_ratio * outputs
        missing = np.ceil(tokens / self._page_size) - slots.num_pages[rows]
        return int(np.maximum(missing, 0).sum())

    def estimate_pages_of(self, slot: int, slots: Slots) -> int:
        """Return the part of one running request in ``estimate_pages``."""
        prefilled = max(int(slots.num_computed_tokens[slot]), int(slots.num_prefill_tokens[slot]))
        total = self._estimate_total(prefilled, int(slots.num_unplanned_outputs[slot]))
        return max(0, total - int(slots.num_pages[slot]))

    def has_room(
        self, request: Request, *, cached_pages: int, available_pages: int, expected_pages: int
    ) -> bool:
        """Return whether the available pages suffice for a request, too, when others need ``expected_pages``."""
        total = self._estimate_total(len(request.tokens), request.remaining)
        return expected_pages + total - cached_pages <= available_pages

    def _estimate_total(self, prefilled: int, remaining: int) -> int:
        """Return the expected pages of a request with ``prefilled`` tokens and ``remaining`` allowed outputs."""
        outputs = min(remaining, CLIP_MAX_NEW_TOKENS)
        return math.ceil((prefilled + self.new_token_ratio * outputs) / self._page_size)

    def decay_ratio(self) -> None:
        """Lower the ratio after a step in which every request found its memory."""
        decay = (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, self.new_token_ratio - decay)

    def raise_ratio(self, slots: Slots) -> None:
        """Raise the ratio after a preemption: too much was admitted.

        Expect at least the share of their outputs that the running requests have produced on average.
        """
        rows = np.flatnonzero(slots.alive)
        left = int(slots.num_unretired_outputs[rows].sum())
        allowed = sum(slots.request(int(slot)).sampling.max_tokens for slot in rows)
        produced = (allowed - left + PREEMPTION_HEADROOM_STEPS * len(rows)) / max(allowed, 1)
        self.new_token_ratio = min(1.0, max(self.new_token_ratio + MIN_RATIO_INCREASE, produced))
