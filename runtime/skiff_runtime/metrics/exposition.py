"""The page of ``/metrics``, written by ``prometheus_client`` and kept for a moment."""

import time
from collections.abc import Callable
from typing import Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

METRICS_TTL_SECONDS: Final = 0.1
"""Age at which a page is made anew. Routers read one every 50 ms, and the streams wait for a millisecond while it is made."""
MAX_FORMATS: Final = 4
"""Pages that are kept at a time, one for each format that was asked for."""


class MetricsExposition:
    """Serves what ``collector`` collects in the format that a scraper accepts: Prometheus' text or OpenMetrics."""

    def __init__(self, collector: Collector, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._clock = clock
        self._pages: dict[str, tuple[bytes, float]] = {}

    def read(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type for a header ``Accept``; the page may be ``METRICS_TTL_SECONDS`` old."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # it compares versions, and one was no number
            encode, content_type = choose_encoder("")
        now = self._clock()
        page, made = self._pages.get(content_type, (b"", -METRICS_TTL_SECONDS))
        if now - made >= METRICS_TTL_SECONDS:
            page = encode(self._registry)
            if len(self._pages) == MAX_FORMATS:
                self._pages.clear()
            self._pages[content_type] = page, now
        return page, content_type
