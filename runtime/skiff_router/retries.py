"""The retry budget: a bound on retries, so that a failing cluster gets no multiple of its requests."""

from typing import Final

MAX_ATTEMPTS: Final = 3
"""Attempts for one request, the first included."""
RETRIES_PER_REQUEST: Final = 0.2
MAX_SAVED: Final = 100.0
INITIAL: Final = 20.0


class RetryBudget:
    """Each request earns a fifth of a retry, up to ``MAX_SAVED``; each retry spends one.

    So retries are at most a fifth of all requests in the long run, and the first failures after a quiet time are retried.
    """

    def __init__(self) -> None:
        self._saved = INITIAL

    def earn(self) -> None:
        """Count a request."""
        self._saved = min(MAX_SAVED, self._saved + RETRIES_PER_REQUEST)

    def spend(self) -> bool:
        """Spend a retry; return False if there is none."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
