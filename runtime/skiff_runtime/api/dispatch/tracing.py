"""OpenTelemetry tracing, with ``--otlp-traces-endpoint``: one span for each request, exported by a thread.

Attributes follow OpenTelemetry's semantic conventions for generative AI. The queue of spans is bounded: if the
collector is slow or unreachable, spans are dropped and no request waits. The exporter's OTEL_* environment variables
(headers, certificates, service name) apply too.
"""

import threading
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from skiff_runtime.api.dispatch.request_state import RequestState
from skiff_runtime.errors import ConfigError
from skiff_runtime.metrics.labels import Endpoint, Outcome
from skiff_runtime.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_QUEUED_SPANS: Final = 4096
EXPORT_BATCH_SPANS: Final = 512
EXPORT_DELAY_SECONDS: Final = 2.0
EXPORT_TIMEOUT_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.5
_PATH: Final = "/v1/traces"
OPERATIONS: Final = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.GENERATE: "text_completion",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.RERANK: "rerank",
    Endpoint.SCORE: "score",
}
Attributes = dict[str, str | int | float | bool | list[str]]


def check_tracing() -> None:
    """Raise ``ConfigError`` unless the packages that tracing needs are installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs packages that are not installed ({error}); in Skiff's sources, pip install '.[tracing]'"
        ) from None


class RequestTracer:
    """Exports a span for each request that has ended."""

    def __init__(self, endpoint: str, model: str) -> None:
        check_tracing()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._provider = _make_provider(_traces_url(endpoint))
        self._tracer = self._provider.get_tracer("skiff", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestState) -> None:
        """Queue the span of a request that ends now; its parent is the span in the client's trace context, if any."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        endpoint = request.metadata.endpoint
        assert endpoint is not None
        now_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{OPERATIONS[endpoint]} {self._model}",
            context=self._propagator.extract(request.metadata.trace or {}),
            kind=SpanKind.SERVER,
            attributes=_make_attributes(request, endpoint, self._model),
            start_time=now_ns - int((time.perf_counter() - request.started) * 1e9),
        )
        if request.outcome() is Outcome.FAILED and request.failure is not None:
            span.set_status(Status(StatusCode.ERROR, request.failure.message))
        span.end(now_ns)

    def close(self) -> None:
        """Export the queued spans for at most ``CLOSE_SECONDS``; spans that the collector has not received by then are lost."""
        # The provider's shutdown may wait for the collector much longer, so it runs on a thread that may be left behind.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _traces_url(endpoint: str) -> str:
    """Return a collector's URL, with OTLP's conventional path unless it has one."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else endpoint


def _make_provider(url: str) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "skiff"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(
        OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_SECONDS),
        max_queue_size=MAX_QUEUED_SPANS,
        max_export_batch_size=EXPORT_BATCH_SPANS,
        schedule_delay_millis=EXPORT_DELAY_SECONDS * 1000,
    )
    provider.add_span_processor(processor)
    return provider


def _make_attributes(request: RequestState, endpoint: Endpoint, model: str) -> Attributes:
    sampling, usage = request.spec.sampling, request.usage
    attributes: Attributes = {
        "gen_ai.operation.name": OPERATIONS[endpoint],
        "gen_ai.provider.name": "skiff",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.spec.formatter.id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": request.spec.stream,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "skiff.request_id": request.metadata.request_id,
        "skiff.outcome": str(request.outcome()),
    }
    if sampling.max_tokens:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if request.spec.num_choices > 1:
        attributes["gen_ai.request.choice.count"] = request.spec.num_choices
    if request.ttft is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = request.ttft
    if request.failure is None:
        attributes["gen_ai.response.finish_reasons"] = [request.finish.name.lower()]
    else:
        attributes["error.type"] = request.failure.code or str(request.failure.status)
    return attributes
