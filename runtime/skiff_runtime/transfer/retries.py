"""Bounded retries of one transfer, with waits that double."""

import random
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from skiff_runtime import log
from skiff_runtime.errors import FetchError
from skiff_runtime.transfer.range_source import TransientSourceError

T = TypeVar("T")

ATTEMPTS: Final = 5
BASE_WAIT_SECONDS: Final = 1.0
"""Wait before the second attempt; it doubles with each further attempt."""


class Retries:
    """The attempts at one transfer. ``stop`` ends a wait."""

    def __init__(self, what: str, stop: threading.Event) -> None:
        self._what = what
        self._stop = stop
        self._failures = 0

    def reset(self) -> None:
        """Count from zero again: the transfer has progressed."""
        self._failures = 0

    def wait(self, error: TransientSourceError) -> None:
        """Wait before the next attempt. Raises ``FetchError`` if there is none left."""
        self._failures += 1
        if self._failures >= ATTEMPTS:
            raise FetchError(f"{self._what}: {error}; gave up after {ATTEMPTS} attempts") from error
        # Jitter spreads the retries of many pods.
        wait = BASE_WAIT_SECONDS * 2 ** (self._failures - 1) * random.uniform(0.75, 1.25)
        wait = max(wait, error.wait_seconds)
        log.warning("fetch_attempt_failed", what=self._what, reason=str(error), wait_seconds=wait)
        if self._stop.wait(wait):
            raise FetchError(f"{self._what}: stopped while waiting to try again")


def retry(what: str, stop: threading.Event, action: Callable[[], T]) -> T:
    """Return the result of ``action``, retried on transient errors. Raises ``FetchError`` when it keeps failing."""
    retries = Retries(what, stop)
    while True:
        try:
            return action()
        except TransientSourceError as error:
            retries.wait(error)
