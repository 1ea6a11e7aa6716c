"""Trying again: which failures pass by themselves, how long to wait, when to give up."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from skiff_runtime import log
from skiff_runtime.errors import FetchError

T = TypeVar("T")


class Transient(Exception):
    """A failure that may pass. ``progressed``: the attempt brought bytes all the same."""

    def __init__(self, reason: str, *, wait_seconds: float | None = None, progressed: bool = False) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        self.progressed = progressed


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts`` in a row without progress are too many; the wait doubles from ``base_seconds``."""

    attempts: int = 6
    base_seconds: float = 1.0
    longest_seconds: float = 60.0

    def wait_seconds(self, failures: int) -> float:
        """How long to wait after so many failures in a row; jittered, so that many pods do not return as one."""
        return min(self.base_seconds * 2.0 ** (failures - 1), self.longest_seconds) * random.uniform(
            0.75, 1.25
        )

    def run(self, what: str, stop: threading.Event, attempt: Callable[[], T]) -> T:
        """The result of ``attempt``, tried until it succeeds; FetchError when it does not."""
        failures = 0
        while True:
            try:
                return attempt()
            except Transient as failure:
                failures = 1 if failure.progressed else failures + 1
                wait = self._wait(what, failures, failure)
                log.warning("fetch_retry", what=what, reason=str(failure), wait_seconds=wait)
            if stop.wait(wait):
                raise FetchError(f"{what}: stopped while waiting to try again")

    def _wait(self, what: str, failures: int, failure: Transient) -> float:
        if failures >= self.attempts:
            raise FetchError(f"{what}: {failure}; gave up after {failures} attempts") from failure
        asked = failure.wait_seconds
        if asked is not None and asked > self.longest_seconds:
            raise FetchError(f"{what}: {failure}; the hub asks to come back in {asked:.0f} s") from failure
        return self.wait_seconds(failures) if asked is None else asked


def retry_after_seconds(value: str | None) -> float | None:
    """A Retry-After header, which is seconds or a date; None where it is absent or makes no sense."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
