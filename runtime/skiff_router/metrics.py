"""Prometheus metrics of the router."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skiff_router.endpoints import Registry
from skiff_router.token_usage import TokenUsage
from skiff_router.upstream import Failure
from skiff_runtime import contract

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
FIRST_BYTE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
FIRST_POD_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

MAX_CACHED_SERIES: Final = 4096


class RouterMetrics:
    """All metrics of one router. Models that are not served have the label "", so that clients cannot add series.

    The label `key` has the names of keys, so the file of keys bounds its values.
    """

    def __init__(
        self,
        registry: Registry,
        connections: Callable[[], int],
        *,
        in_flight_by_key: Callable[[], dict[str, int]],
        lost_usage_lines: Callable[[], int],
        peers: Callable[[], int] | None,
    ) -> None:
        """``connections``: returns the number of open connections of clients. ``peers``: of other replicas that share the limits;
        None for a router that shares none.
        """
        self._in_flight_by_key = in_flight_by_key
        self._page = CollectorRegistry()
        self._registry = registry
        self._responses = Counter(
            "skiff_router_requests", "Requests by model and status.", ("model", "code"), registry=self._page
        )
        self._retries = Counter(
            "skiff_router_retries", "Attempts on another pod.", ("model",), registry=self._page
        )
        self._canary_choices = Counter(
            "skiff_router_canary_choices",
            "Attempts during a canary, by the revision that they were sent to: canary or stable.",
            ("model", "revision"),
            registry=self._page,
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
        self._waiting = Gauge(
            contract.ROUTER_METRIC_WAITING, "Requests that wait for a pod.", ("model",), registry=self._page
        )
        self._waits = Counter(
            "skiff_router_waits",
            "Requests that waited for a pod, by outcome.",
            ("model", "outcome"),
            registry=self._page,
        )
        self._scale_requests = Counter(
            "skiff_router_scale_requests",
            "Requests for pods to the API server, by result.",
            ("model", "result"),
            registry=self._page,
        )
        self._first_pod = Histogram(
            "skiff_router_first_pod_request_seconds",
            "Time from the arrival of the first waiting request until the API server accepted the request for a first pod.",
            ("model",),
            buckets=FIRST_POD_BUCKETS,
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
        self._tokens = Counter(
            "skiff_router_tokens",
            "Tokens of requests by the name of their API key, model and kind; cached ones are also prompt tokens.",
            ("key", "model", "kind"),
            registry=self._page,
        )
        self._estimated = Counter(
            "skiff_router_estimated_usages",
            "Requests whose tokens were not reported and are estimated.",
            ("model",),
            registry=self._page,
        )
        self._prefix_tokens = Counter(
            "skiff_router_prefix_tokens",
            "Prompt tokens that were expected to be cached at the chosen pods, and those that were: expected or actual.",
            ("model", "kind"),
            registry=self._page,
        )
        self._limited = Counter(
            "skiff_router_limited_requests",
            "Requests refused by a limit of their API key.",
            ("key", "limit"),
            registry=self._page,
        )
        self._key_requests = Gauge(
            "skiff_router_key_requests_in_flight",
            "Requests in progress by the name of their API key.",
            ("key",),
            registry=self._page,
        )
        if peers is not None:
            Gauge(
                "skiff_router_peers", "Other replicas that share the limits, and answer.", registry=self._page
            ).set_function(peers)
        self._reloaded = Gauge(
            "skiff_router_last_reload_successful",
            "1 while the content of the flag's file is in force, 0 while it cannot be used.",
            ("flag",),
            registry=self._page,
        )
        # Finding a series by its labels costs ten times as much as counting.
        self._responses_of = lru_cache(MAX_CACHED_SERIES)(self._responses.labels)
        self._first_byte_of = lru_cache(MAX_CACHED_SERIES)(self._first_byte.labels)
        self._tokens_of = lru_cache(MAX_CACHED_SERIES)(self._tokens.labels)
        self._lost_usage_lines = lost_usage_lines
        self._counted_lost = 0
        self._lost = Counter(
            "skiff_router_lost_usage_lines",
            "Lines of the usage log that could not be written.",
            registry=self._page,
        )

    def record_response(self, model: str, status: int) -> None:
        """Count a response to a client."""
        self._responses_of(model, str(status)).inc()

    def record_retry(self, model: str) -> None:
        """Count an attempt beyond the first."""
        self._retries.labels(model).inc()

    def record_canary_choice(self, model: str, *, canary: bool) -> None:
        """Count an attempt while a canary splits the requests."""
        self._canary_choices.labels(model, "canary" if canary else "stable").inc()

    def record_failure(self, model: str, failure: Failure) -> None:
        """Count an attempt that failed."""
        self._failures.labels(model, failure.value).inc()

    def record_first_byte(self, model: str, seconds: float) -> None:
        """Record the time to the first byte of a response."""
        self._first_byte_of(model).observe(seconds)

    def record_waiting(self, model: str, change: int) -> None:
        """Change the number of requests that wait for a pod."""
        self._waiting.labels(model).inc(change)

    def record_wait(self, model: str, outcome: str) -> None:
        """Count the end of a wait: released, timeout, unavailable, disconnected or rejected."""
        self._waits.labels(model, outcome).inc()

    def record_scale_request(self, model: str, result: str) -> None:
        """Count a request for pods: accepted, conflict or failed."""
        self._scale_requests.labels(model, result).inc()

    def record_first_pod_request(self, model: str, seconds: float) -> None:
        """Record the time from a request at zero pods until the API server accepted the request for the first one."""
        self._first_pod.labels(model).observe(seconds)

    def record_rejection(self, status: int) -> None:
        """Count a request that was rejected before its model was known."""
        self.record_response("", status)

    def record_usage(self, key: str, model: str, usage: TokenUsage) -> None:
        """Count the tokens of a request."""
        for kind, tokens in (
            ("prompt", usage.prompt),
            ("cached", usage.cached),
            ("completion", usage.completion),
        ):
            if tokens:
                self._tokens_of(key, model, kind).inc(tokens)
        if usage.estimated:
            self._estimated.labels(model).inc()

    def record_prefix_hit(self, model: str, *, expected: int, actual: int) -> None:
        """Count the cached tokens of an ended request's prompt: as they were expected when its pod was chosen, and as reported."""
        self._prefix_tokens.labels(model, "expected").inc(expected)
        self._prefix_tokens.labels(model, "actual").inc(actual)

    def record_limited(self, key: str, limit: str) -> None:
        """Count a request that a limit of its key refused."""
        self._limited.labels(key, limit).inc()

    def record_reload(self, flag: str, *, success: bool) -> None:
        """Record whether the content of a flag's file is in force."""
        self._reloaded.labels(flag).set(success)

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        self._endpoints.clear()
        self._in_flight.clear()
        lost = self._lost_usage_lines()
        self._lost.inc(lost - self._counted_lost)
        self._counted_lost = lost
        self._key_requests.clear()
        for key, count in self._in_flight_by_key().items():
            self._key_requests.labels(key).set(count)
        for backend in self._registry.backends:
            states = {"available": 0, "draining": 0, "ejected": 0, "not_ready": 0, "silent": 0}
            for endpoint in backend.endpoints:
                states[endpoint.state] += 1
            for state, count in states.items():
                self._endpoints.labels(backend.model, state).set(count)
            self._in_flight.labels(backend.model).set(sum(each.in_flight for each in backend.endpoints))
        return generate_latest(self._page)
