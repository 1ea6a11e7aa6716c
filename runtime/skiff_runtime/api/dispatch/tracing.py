"""OpenTelemetry traces of requests, where ``--otlp-traces-endpoint`` asks for them: one span a request, sent by a thread.

Attributes have the names of OpenTelemetry's semantic conventions for generative AI. The queue of spans is bounded:
where the collector is slow or gone, spans are dropped, and no request waits. The OTEL_* variables of the exporter
(headers, certificates, service name) hold, too.
"""

import threading
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from skiff_runtime import __version__
from skiff_runtime.api.dispatch.request_state import Flight
from skiff_runtime.errors import ConfigError
from skiff_runtime.metrics.labels import Endpoint, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_QUEUED_SPANS: Final = 4096
EXPORT_BATCH_SPANS: Final = 512
EXPORT_DELAY_SECONDS: Final = 2.0
EXPORT_TIMEOUT_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.5
_PATH: Final = "/v1/traces"
_OPERATIONS: Final = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.GENERATE: "text_completion",
}
Attributes = dict[str, str | int | float | bool | list[str]]


def check_tracing() -> None:
    """Raise ``ConfigError`` unless the packages that traces need are installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs packages that are not installed ({error}); in Skiff's sources, pip install '.[tracing]'"
        ) from None


class RequestTracer:
    """Turns each request that has ended into a span."""

    def __init__(self, endpoint: str, model: str) -> None:
        check_tracing()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._provider = _provider(_traces_url(endpoint))
        self._tracer = self._provider.get_tracer("skiff", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, flight: Flight) -> None:
        """Queue the span of a request that ends now; its parent is the client's span, if it told one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        assert flight.caller.endpoint is not None
        now_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{_OPERATIONS[flight.caller.endpoint]} {self._model}",
            context=self._propagator.extract(flight.caller.trace or {}),
            kind=SpanKind.SERVER,
            attributes=_attributes(flight, self._model),
            start_time=now_ns - int((time.perf_counter() - flight.started) * 1e9),
        )
        if flight.outcome() is Outcome.FAILED and flight.failure is not None:
            span.set_status(Status(StatusCode.ERROR, flight.failure.message))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is queued, for a moment; what a slow collector has not taken by then is lost."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)


def _traces_url(endpoint: str) -> str:
    """A collector's address has the conventional path, unless it names another."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else endpoint


def _provider(url: str) -> "TracerProvider":
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


def _attributes(flight: Flight, model: str) -> Attributes:
    assert flight.caller.endpoint is not None
    sampling, usage = flight.generation.sampling, flight.usage
    told: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[flight.caller.endpoint],
        "gen_ai.provider.name": "skiff",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": flight.generation.formatter.id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": flight.generation.stream,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "skiff.request_id": flight.caller.request_id,
        "skiff.outcome": str(flight.outcome()),
    }
    if sampling.max_tokens:
        told["gen_ai.request.max_tokens"] = sampling.max_tokens
    if flight.generation.num_choices > 1:
        told["gen_ai.request.choice.count"] = flight.generation.num_choices
    if flight.ttft is not None:
        told["gen_ai.response.time_to_first_chunk"] = flight.ttft
    if flight.failure is None:
        told["gen_ai.response.finish_reasons"] = [flight.finish.name.lower()]
    else:
        told["error.type"] = flight.failure.code or str(flight.failure.status)
    return told
