"""Exposition of the metrics at ``/metrics``, written by ``prometheus_client`` and cached for a moment."""

import time
from collections.abc import Callable
from typing import Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

METRICS_TTL_SECONDS: Final = 0.1
"""Time for which an exposition is cached. Routers scrape every 50 ms, and writing one delays all streams by 1 ms."""
MAX_FORMATS: Final = 4
"""Maximum number of cached expositions, one for each format that was requested."""


class MetricsExposition:
    """Serves a collector's metrics in the format that the scraper accepts: Prometheus' text format or OpenMetrics."""

    def __init__(self, collector: Collector, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._clock = clock
        self._pages: dict[str, tuple[bytes, float]] = {}

    def read(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition for an ``Accept`` header, at most ``METRICS_TTL_SECONDS`` old, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # it compares versions, and this one is no number
            encode, content_type = choose_encoder("")
        now = self._clock()
        page, written_at = self._pages.get(content_type, (b"", -METRICS_TTL_SECONDS))
        if now - written_at >= METRICS_TTL_SECONDS:
            page = encode(self._registry)
            if len(self._pages) == MAX_FORMATS:
                self._pages.clear()  # a client may name any version, so the formats are not bounded by themselves
            self._pages[content_type] = page, now
        return page, content_type
