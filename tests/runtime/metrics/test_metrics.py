"""Metrics: the exposition is well formed, complete, documented and equal to the recorded events."""

import re
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from skiff_runtime import contract
from skiff_runtime.messages import FinishReason, StepStats, Usage
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.exposition import MAX_FORMATS, METRICS_TTL_SECONDS, MetricsExposition
from skiff_runtime.metrics.labels import AbortReason, Endpoint, Outcome
from skiff_runtime.metrics.vllm_names import LORA_INFO, NAMES, VllmNames

STATS = StepStats(
    queued=3,
    running=2,
    pages_total=100,
    pages_free=60,
    pages_cached=15,
    page_size=16,
    step_seconds=0.02,
    prefill_tokens=30,
    decode_tokens=2,
    preempted=1,
    evicted_pages=4,
    prefill_rows=3,
    queued_tokens=900,
    lookup_tokens=40,
    hit_tokens=16,
    queue_seconds=[0.001, 0.2],
    running_adapters=[2, 5],
    waiting_adapters=[3],
    resident_adapters=[2, 4, 5],
    adapter_reads=1,
    adapter_loads=2,
    adapter_evictions=1,
)


def make(vllm_names: VllmNames | None = None) -> Metrics:
    metrics = Metrics(
        vllm_names=vllm_names,
        in_flight=lambda: 7,
        connections=lambda: 9,
        ready=lambda: True,
        phase_seconds=lambda: {"weights": 1.5},
        heartbeats=lambda: [("rank0", True, 0.5), ("tokenizer0", False, 61.0)],
        max_loras=4,
        num_adapters=lambda: 6,
        adapter_names=lambda ids: [f"a{each}" for each in ids],
    )
    metrics.record_key_reload("--api-key-file", success=True)
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    page, _ = MetricsExposition(metrics).read()
    for family in text_string_to_metric_families(page.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, "the series appears twice"
            found[key] = sample.value
    return found


def test_every_metric_of_the_contract_is_exposed() -> None:
    names = {
        value
        for name, value in vars(contract).items()
        if name.startswith(("METRIC_", "ROUTING_")) and isinstance(value, str)
    }
    exposed = {key.partition("{")[0] for key in samples(make())}
    plain = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in exposed}
    assert names - plain == set()
    assert plain - names == set()


def test_documentation_has_type_and_labels_of_each_metric() -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    documented = {
        row[0].strip("`"): (row[1], tuple(re.findall(r"`(\w+)`", row[2]))) for row in rows if len(row) == 4
    }
    families = [family for family in make().families() if not family.name.startswith("sglang:")]
    assert len(families) > 25
    for family in families:
        assert documented.get(family.name) == (family.kind, family.labels), family.name


def test_gauges_show_the_last_step() -> None:
    metrics = make()
    metrics.record_step(StepStats(running=50), generated=0)
    metrics.record_step(STATS, generated=2)
    found = samples(metrics)
    assert found["skiff_requests_queued"] == found["sglang:num_queue_reqs"] == 3
    assert found["skiff_requests_running"] == found["sglang:num_running_reqs"] == 2
    assert found["skiff_kv_cache_usage_ratio"] == found["sglang:token_usage"] == 0.25
    assert found["sglang:cache_config_info{num_pages=100,page_size=16}"] == 1
    assert [found[f"skiff_kv_cache_pages{{state={state}}}"] for state in ("free", "cached", "used")] == [
        60,
        15,
        25,
    ]
    assert found["skiff_lora_adapters"] == 6
    assert [found[f"skiff_lora_slots{{state={state}}}"] for state in ("used", "idle", "empty")] == [2, 1, 1]
    assert found["skiff_requests_in_flight"] == 7
    assert found["skiff_ready"] == 1
    assert (found["skiff_http_connections"], found["skiff_queued_prompt_tokens"]) == (9, 900)
    assert [found[f"skiff_process_up{{process={name}}}"] for name in ("rank0", "tokenizer0")] == [1, 0]
    assert found["skiff_process_heartbeat_age_seconds{process=tokenizer0}"] == 61
    assert found["skiff_start_phase_seconds{phase=weights}"] == 1.5


def test_counters_sum_over_events() -> None:
    metrics = make()
    for _ in range(3):
        metrics.record_step(STATS, generated=2)
        metrics.record_usage(Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4))
    metrics.record_request(Endpoint.CHAT, Outcome.FINISHED, 0.3)
    metrics.record_request(Endpoint.CHAT, Outcome.REJECTED, 0.0)
    metrics.record_abort(AbortReason.DEADLINE)
    for status in (400, 422, 429, 503, 401):
        metrics.record_rejection(status)
    found = samples(metrics)
    assert found["skiff_generation_tokens_total"] == 6
    assert found["skiff_prompt_tokens_total"] == 30
    assert found["skiff_cached_tokens_total"] == 12
    assert found["skiff_preemptions_total"] == 3
    assert found["skiff_evicted_pages_total"] == 12
    assert found["skiff_lora_reads_total"] == found["skiff_lora_slot_evictions_total"] == 3
    assert found["skiff_lora_slot_loads_total"] == 6
    assert found["skiff_requests_total{endpoint=chat,outcome=finished}"] == 1
    assert found["skiff_requests_total{endpoint=chat,outcome=rejected}"] == 1
    assert found["skiff_requests_total{endpoint=generate,outcome=failed}"] == 0
    assert found["skiff_e2e_request_latency_seconds_count{endpoint=chat}"] == 1
    assert found["skiff_aborted_requests_total{reason=deadline}"] == 1
    assert found["skiff_aborted_requests_total{reason=disconnect}"] == 0
    reasons = ("invalid", "queue_full", "unavailable", "unauthorized", "too_large")
    assert [found[f"skiff_rejected_requests_total{{reason={each}}}"] for each in reasons] == [2, 1, 1, 1, 0]
    assert (found["skiff_request_prompt_tokens_sum"], found["skiff_request_generation_tokens_sum"]) == (
        30,
        15,
    )
    assert (found["skiff_prefix_cache_queries_total"], found["skiff_prefix_cache_hits_total"]) == (120, 48)
    assert found["skiff_request_queue_time_seconds_count"] == 6


def test_steps_are_counted_by_kind() -> None:
    metrics = make()
    metrics.record_step(STATS, generated=2)
    metrics.record_step(StepStats(step_seconds=0.5, prefill_tokens=9), generated=0)
    metrics.record_step(StepStats(step_seconds=0.5, decode_tokens=9), generated=9)
    metrics.record_step(StepStats(), generated=0)
    found = samples(metrics)
    counts = [
        found[f"skiff_step_duration_seconds_count{{kind={kind}}}"] for kind in ("prefill", "decode", "mixed")
    ]
    assert counts == [1, 1, 1]
    assert found["skiff_step_tokens_sum"] == 32 + 9 + 9
    assert (found["skiff_prefill_batch_requests_sum"], found["skiff_prefill_batch_requests_count"]) == (3, 1)
    assert (found["skiff_decode_batch_requests_sum"], found["skiff_decode_batch_requests_count"]) == (11, 2)


def test_histogram_buckets_are_cumulative() -> None:
    metrics = make()
    values = [0.0005, 0.001, 0.0011, 0.0011, 0.02, 100.0]
    for value in values:
        metrics.itl.observe(value)
    found = samples(metrics)
    buckets = {
        float(key.partition("le=")[2].rstrip("}")): value
        for key, value in found.items()
        if key.startswith("skiff_inter_token_latency_seconds_bucket")
    }
    assert buckets == {bound: sum(v <= bound for v in values) for bound in buckets}
    assert buckets[float("inf")] == found["skiff_inter_token_latency_seconds_count"] == len(values)
    assert found["skiff_inter_token_latency_seconds_sum"] == sum(values)


def test_kv_capacity_is_reported_before_the_first_step() -> None:
    metrics = make()
    metrics.record_kv_capacity(1024, 16)
    assert samples(metrics)["skiff_kv_cache_pages{state=free}"] == 64


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_exposition_is_cached_until_its_ttl() -> None:
    metrics, clock = make(), Clock()
    page = MetricsExposition(metrics, clock=clock)
    before, _ = page.read()
    metrics.record_step(STATS, generated=2)
    clock.now = 0.9 * METRICS_TTL_SECONDS
    assert page.read()[0] == before
    clock.now = METRICS_TTL_SECONDS
    assert b"skiff_generation_tokens_total 2.0\n" in page.read()[0]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=abc", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=x, */*", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
    ],
)
def test_exposition_has_the_format_of_the_accept_header(accept: str, kind: str) -> None:
    page, content_type = MetricsExposition(make()).read(accept)
    assert content_type == kind
    parse = text_string_to_metric_families if "plain" in kind else openmetrics.text_string_to_metric_families
    found = {sample.name: sample.value for family in parse(page.decode()) for sample in family.samples}
    assert found["skiff_requests_in_flight"] == 7 and found["skiff_generation_tokens_total"] == 0
    assert not [name for name in found if name.endswith("_created")]


@pytest.mark.parametrize("escaping", ["", ";escaping=underscores", ";escaping=allow-utf-8", ";escaping=dots"])
@pytest.mark.parametrize("media_type", ["application/openmetrics-text", "text/plain"])
def test_names_keep_their_colons_and_underscores_in_every_format(media_type: str, escaping: str) -> None:
    page, content_type = MetricsExposition(make(VllmNames("m"))).read(f"{media_type};version=1.0.0{escaping}")
    assert media_type in content_type
    names = set(re.findall(r"^([\w:]+)[ {]", page.decode(), re.MULTILINE))
    assert {"vllm:num_requests_waiting", "vllm:iteration_tokens_total_bucket", "sglang:token_usage"} <= names
    assert "skiff_requests_in_flight" in names and not [name for name in names if name.startswith("vllm_")]


def test_number_of_cached_formats_is_bounded() -> None:
    page = MetricsExposition(make(), clock=Clock())
    for minor in range(3 * MAX_FORMATS):
        page.read(f"text/plain;version=1.{minor}.0;escaping=dots")
        page.read(f"application/openmetrics-text;version=1.{minor}.0")
    assert len(page._pages) <= MAX_FORMATS


def test_vllm_names_have_the_values_of_our_own() -> None:
    metrics = make(VllmNames("m"))
    metrics.record_step(STATS, generated=2)
    metrics.record_usage(Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4))
    for endpoint in (Endpoint.CHAT, Endpoint.MESSAGES):
        metrics.record_request(endpoint, Outcome.FINISHED, 0.3)
    metrics.record_finish(FinishReason.LENGTH)
    metrics.ttft.observe(0.02)
    metrics.itl.observe(0.004)
    metrics.record_generation(longest_choice=5, choices=2, max_tokens=64)
    metrics.record_choice_times(started_at=10.0, first_token_at=10.5, last_token_at=12.5, tokens=5)
    metrics.record_choice_times(started_at=0.0, first_token_at=10.5, last_token_at=10.5, tokens=1)
    found = samples(metrics)
    base = "{engine=0,model_name=m}"
    assert found[f"vllm:num_requests_running{base}"] == 2
    assert found[f"vllm:num_requests_waiting{base}"] == 3
    assert found[f"vllm:kv_cache_usage_perc{base}"] == 0.25
    assert found[f"vllm:prefix_cache_queries_total{base}"] == 40
    assert found[f"vllm:prefix_cache_hits_total{base}"] == 16
    assert found[f"vllm:prompt_tokens_total{base}"] == 10
    assert found[f"vllm:generation_tokens_total{base}"] == 2
    assert found[f"vllm:e2e_request_latency_seconds_count{base}"] == 2  # summed over the endpoints
    assert found[f"vllm:e2e_request_latency_seconds_sum{base}"] == 0.6
    assert found["vllm:e2e_request_latency_seconds_bucket{engine=0,le=0.5,model_name=m}"] == 2
    assert found["vllm:time_to_first_token_seconds_bucket{engine=0,le=0.025,model_name=m}"] == 1
    assert found[f"vllm:inter_token_latency_seconds_count{base}"] == 1
    assert found[f"vllm:prompt_tokens_cached_total{base}"] == 4
    sums = {
        "request_max_num_generation_tokens": 5,
        "request_params_n": 2,
        "request_params_max_tokens": 64,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 0.5,
        "iteration_tokens_total": 32,
    }
    assert {name: found[f"vllm:{name}_sum{base}"] for name in sums} == sums
    assert found[f"vllm:request_decode_time_seconds_count{base}"] == 2
    assert found[f"vllm:request_prefill_time_seconds_count{base}"] == 1  # one start was not known
    assert found[f"vllm:request_time_per_output_token_seconds_count{base}"] == 1  # one had a single token
    assert found["vllm:request_success_total{engine=0,finished_reason=length,model_name=m}"] == 1
    assert found["vllm:cache_config_info{block_size=16,engine=0,model_name=m,num_gpu_blocks=100}"] == 1
    [lora] = [name for name in found if name.startswith(LORA_INFO)]
    assert lora == (
        f"{LORA_INFO}{{engine=0,max_lora=4,model_name=m,running_lora_adapters=a2,a5,waiting_lora_adapters=a3}}"
    )
    assert found[lora] == pytest.approx(time.time(), abs=60)
    exposed = {name.partition("{")[0] for name in found if name.startswith("vllm:")}
    plain = {re.sub("_(bucket|sum|count)$", "", name) for name in exposed}
    assert plain == {*NAMES, LORA_INFO}
    assert not [name for name in samples(make()) if name.startswith("vllm:")]
    page, _ = MetricsExposition(make(VllmNames("m"))).read("application/openmetrics-text;version=1.0.0")
    families = list(openmetrics.text_string_to_metric_families(page.decode()))  # type: ignore[no-untyped-call]
    assert families


def test_every_vllm_name_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(vllm:\w+)` \| `([\w:]+)`", page, re.MULTILINE))
    assert rows == NAMES
