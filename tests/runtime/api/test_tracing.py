"""Tracing, with an HTTP server that decodes spans in place of the collector."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from frontend import NAME, TIMEOUT_SECONDS, running_frontend, write_model
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from skiff_runtime.api.dispatch.tracing import OPERATIONS, RequestTracer
from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError
from skiff_runtime.messages import Drain, FinishReason, RequestFailed
from skiff_runtime.metrics.labels import Endpoint

CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 9}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps every span that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.take(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def test_each_request_exports_a_span(collector: Collector, tmp_path: Path) -> None:
    with (
        running_frontend(write_model(tmp_path), otlp_traces_endpoint=collector.url) as front,
        ThreadPoolExecutor(2) as pool,
    ):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        pending = pool.submit(front.http.post, front.url + CHAT, json=BODY, headers=headers)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "boat", FinishReason.STOP)
        reply = pending.result().json()
        failing = pool.submit(front.post, CHAT, **BODY)
        uid = front.rank.request().uid
        front.rank.step(
            [], failed=[RequestFailed(uid, 500, "internal_server_error", "out of luck", "internal_error")]
        )
        assert failing.result().status_code == 500
        front.api.send(Drain(timeout_seconds=5))
        assert front.wait_exit() == 0
    good, bad = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert collector.services == {"skiff"}
    assert (good.name, good.trace_id.hex(), good.parent_span_id.hex()) == (f"chat {NAME}", TRACE, PARENT)
    assert 0 < good.end_time_unix_nano - good.start_time_unix_nano < TIMEOUT_SECONDS * 1e9
    assert abs(good.end_time_unix_nano / 1e9 - time.time()) < 2 * TIMEOUT_SECONDS
    exported = attributes(good)
    assert exported["gen_ai.response.id"] == reply["id"] and exported["skiff.request_id"] == "mine"
    assert exported["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert exported["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert exported["gen_ai.response.finish_reasons"] == ["stop"]
    assert (exported["gen_ai.request.temperature"], exported["gen_ai.request.max_tokens"]) == (0.5, 9)
    assert 0 < exported["gen_ai.response.time_to_first_chunk"] < TIMEOUT_SECONDS
    assert bad.parent_span_id == b"" and bad.trace_id != good.trace_id
    assert (bad.status.message, attributes(bad)["error.type"]) == ("out of luck", "internal_error")


def test_each_endpoint_has_an_operation() -> None:
    assert set(OPERATIONS) == set(Endpoint)


def test_unreachable_collector_is_harmless(tmp_path: Path) -> None:
    with (
        running_frontend(write_model(tmp_path), otlp_traces_endpoint="http://127.0.0.1:9") as front,
        ThreadPoolExecutor(1) as pool,
    ):
        pending = pool.submit(front.post, CHAT, **BODY)
        front.rank.finish(front.rank.request().uid, FinishReason.STOP)
        assert pending.result().status_code == 200
        front.api.send(Drain(timeout_seconds=1))
        assert front.wait_exit() == 0


@pytest.mark.parametrize("address", ["localhost:4317", "grpc://x:1", "http://", ""])
def test_invalid_endpoint_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Config(otlp_traces_endpoint=address)


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[tracing\]'"):
        RequestTracer("http://127.0.0.1:4318", NAME)
