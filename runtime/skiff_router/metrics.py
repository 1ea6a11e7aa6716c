"""Prometheus metrics of the router."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skiff_router.endpoints import Registry
from skiff_router.upstream import Failure

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
FIRST_BYTE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    """All metrics of one router. Models that are not served have the label "", so that clients cannot add series."""

    def __init__(self, registry: Registry, connections: Callable[[], int]) -> None:
        """``connections``: returns the number of open connections of clients."""
        self._page = CollectorRegistry()
        self._registry = registry
        self._responses = Counter(
            "skiff_router_requests", "Requests by model and status.", ("model", "code"), registry=self._page
        )
        self._retries = Counter(
            "skiff_router_retries", "Attempts on another pod.", ("model",), registry=self._page
        )
        self._failures = Counter(
            "skiff_router_attempt_failures",
            "Failed attempts, by cause.",
            ("model", "failure"),
            registry=self._page,
        )
        self._first_byte = Histogram(
            "skiff_router_first_byte_seconds",
            "Time from the end of a request's body to the first byte of its response from a pod.",
            ("model",),
            buckets=FIRST_BYTE_BUCKETS,
            registry=self._page,
        )
        self._endpoints = Gauge(
            "skiff_router_endpoints", "Pods by state.", ("model", "state"), registry=self._page
        )
        self._in_flight = Gauge(
            "skiff_router_requests_in_flight", "Requests at pods.", ("model",), registry=self._page
        )
        self._connections = Gauge(
            "skiff_router_connections", "Open connections of clients.", registry=self._page
        )
        self._connections.set_function(connections)

    def record_response(self, model: str, status: int) -> None:
        """Count a response to a client."""
        self._responses.labels(model, str(status)).inc()

    def record_retry(self, model: str) -> None:
        """Count an attempt beyond the first."""
        self._retries.labels(model).inc()

    def record_failure(self, model: str, failure: Failure) -> None:
        """Count an attempt that failed."""
        self._failures.labels(model, failure.value).inc()

    def record_first_byte(self, model: str, seconds: float) -> None:
        """Record the time to the first byte of a response."""
        self._first_byte.labels(model).observe(seconds)

    def record_rejection(self, status: int) -> None:
        """Count a request that was rejected before its model was known."""
        self.record_response("", status)

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        self._endpoints.clear()
        self._in_flight.clear()
        for backend in self._registry.backends:
            states = {"available": 0, "draining": 0, "ejected": 0, "not_ready": 0, "silent": 0}
            for endpoint in backend.endpoints:
                states[endpoint.state] += 1
            for state, count in states.items():
                self._endpoints.labels(backend.model, state).set(count)
            self._in_flight.labels(backend.model).set(sum(each.in_flight for each in backend.endpoints))
        return generate_latest(self._page)
