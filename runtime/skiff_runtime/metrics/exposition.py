"""Exposition of the metrics at ``/metrics``, written by ``prometheus_client`` and cached for a moment."""

import re
import time
from collections.abc import Callable
from typing import Final

from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

METRICS_TTL_SECONDS: Final = 0.1
"""Time for which an exposition is cached. Routers scrape every 50 ms, and writing one delays all streams by 1 ms."""
MAX_FORMATS: Final = 4
"""Maximum number of cached expositions, one for each format that was requested."""


_ESCAPING: Final = re.compile(r";\s*escaping=[^;,]*")
"""The parameter of an ``Accept`` header by which a scraper names a scheme for names outside the classic character set."""


class MetricsExposition:
    """Serves a collector's metrics in the format that the scraper accepts: Prometheus' text format or OpenMetrics."""

    def __init__(self, collector: Collector, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._clock = clock
        self._pages: dict[str, tuple[bytes, float]] = {}

    def read(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition for an ``Accept`` header, at most ``METRICS_TTL_SECONDS`` old, and its content type."""
        accept = _ESCAPING.sub("", accept)  # every name here is a classic one, which needs no escaping
        try:
            _, content_type = choose_encoder(accept)
        except TypeError:  # it compares versions, and this one is no number
            _, content_type = choose_encoder("")
        now = self._clock()
        page, written_at = self._pages.get(content_type, (b"", -METRICS_TTL_SECONDS))
        if now - written_at >= METRICS_TTL_SECONDS:
            page = self._encode(content_type)
            if len(self._pages) == MAX_FORMATS:
                self._pages.clear()  # a client may name any version, so the formats are not bounded by themselves
            self._pages[content_type] = page, now
        return page, content_type

    def _encode(self, content_type: str) -> bytes:
        """Write the page with all names as they are. By default, the writer of OpenMetrics replaces colons in them."""
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        write = openmetrics.generate_latest if is_openmetrics else generate_latest
        return write(self._registry, escaping=openmetrics.ALLOWUTF8)
