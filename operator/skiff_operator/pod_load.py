"""The load of a pod, from its page of metrics. Pure.

The mean time to first token is that of the requests that had their first token within the last `RECENT_SECONDS`: the
difference of two readings of the histogram's sum and count. A counter that has become smaller belongs to another server.
"""

from collections import deque
from typing import Final

import msgspec

from skiff_operator.autoscaling import PodLoad
from skiff_operator.metrics_page import samples
from skiff_runtime import contract

RECENT_SECONDS: Final = 30.0
_MAX_READINGS: Final = 64
_TTFT_SUM: Final = f"{contract.METRIC_TTFT}_sum"
_TTFT_COUNT: Final = f"{contract.METRIC_TTFT}_count"
_REQUESTS: Final = f"{contract.METRIC_REQUESTS}{{"


class PodReading(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one page. `ended`: requests with any outcome since the server's start."""

    running: float
    waiting: float
    queued_tokens: float
    kv_usage: float
    in_flight: float
    ended: float
    ttft_sum: float
    ttft_count: float


def read(page: str) -> PodReading | None:
    """Read a page; None if it lacks the gauges of requests."""
    values: dict[str, float] = {}
    ended = 0.0
    for series, value in samples(page):
        if series.startswith(_REQUESTS):
            ended += value
        elif "{" not in series:
            values[series] = value
    running, waiting = values.get(contract.METRIC_RUNNING), values.get(contract.METRIC_QUEUED)
    if running is None or waiting is None:
        return None
    return PodReading(
        running=running,
        waiting=waiting,
        queued_tokens=values.get(contract.METRIC_QUEUED_TOKENS, 0.0),
        kv_usage=min(1.0, values.get(contract.METRIC_KV_CACHE_USAGE, 0.0)),
        in_flight=values.get(contract.METRIC_IN_FLIGHT, 0.0),
        ended=ended,
        ttft_sum=values.get(_TTFT_SUM, 0.0),
        ttft_count=values.get(_TTFT_COUNT, 0.0),
    )


class LoadHistory:
    """The recent readings of one pod."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float, float]] = deque(maxlen=_MAX_READINGS)

    def add(self, now: float, reading: PodReading) -> PodLoad:
        """Add a reading; return the pod's load."""
        if self._readings and reading.ttft_count < self._readings[-1][2]:
            self._readings.clear()
        self._readings.append((now, reading.ttft_sum, reading.ttft_count))
        while now - self._readings[0][0] > RECENT_SECONDS:
            self._readings.popleft()
        _, first_sum, first_count = self._readings[0]
        count = reading.ttft_count - first_count
        return PodLoad(
            running=reading.running,
            waiting=reading.waiting,
            queued_tokens=reading.queued_tokens,
            kv_usage=reading.kv_usage,
            ttft_seconds=max(0.0, reading.ttft_sum - first_sum) / count if count > 0 else None,
            accepted=reading.ended + reading.in_flight,
        )
