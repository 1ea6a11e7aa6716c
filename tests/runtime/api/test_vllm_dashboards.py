"""vLLM's Grafana dashboards on a Skiff pod: each series that their queries select exists, with its labels and with data.

The series and labels are those of the queries in vLLM's examples/observability: prometheus_grafana/grafana.json and
dashboards/grafana/performance_statistics.json and query_statistics.json.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
from frontend import NAME, Frontend, running_frontend, write_model
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from skiff_runtime.messages import FinishReason, StepStats

MODEL: Final = frozenset({"model_name"})
QUANTILES: Final = MODEL | {"le"}
SELECTED: Final = {
    "vllm:e2e_request_latency_seconds_bucket": QUANTILES,
    "vllm:e2e_request_latency_seconds_count": MODEL,
    "vllm:e2e_request_latency_seconds_sum": MODEL,
    "vllm:generation_tokens_total": MODEL,
    "vllm:inter_token_latency_seconds_bucket": QUANTILES,
    "vllm:inter_token_latency_seconds_count": MODEL,
    "vllm:inter_token_latency_seconds_sum": MODEL,
    "vllm:iteration_tokens_total_count": MODEL,
    "vllm:kv_cache_usage_perc": MODEL,
    "vllm:num_requests_running": MODEL,
    "vllm:num_requests_waiting": MODEL,
    "vllm:prompt_tokens_total": MODEL,
    "vllm:request_decode_time_seconds_sum": MODEL,
    "vllm:request_generation_tokens_bucket": QUANTILES,
    "vllm:request_max_num_generation_tokens_sum": MODEL,
    "vllm:request_prefill_time_seconds_sum": MODEL,
    "vllm:request_prompt_tokens_bucket": QUANTILES,
    "vllm:request_queue_time_seconds_sum": MODEL,
    "vllm:request_success_total": MODEL | {"finished_reason"},
    "vllm:time_to_first_token_seconds_bucket": QUANTILES,
    "vllm:time_to_first_token_seconds_count": MODEL,
    "vllm:time_to_first_token_seconds_sum": MODEL,
}
"""Name of each series that a query selects, and the labels by which queries select or aggregate it."""
STATS: Final = StepStats(
    queued=3,
    running=2,
    pages_total=8,
    pages_free=6,
    page_size=16,
    step_seconds=0.01,
    prefill_tokens=4,
    decode_tokens=2,
    queue_seconds=[0.25],
)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with running_frontend(write_model(tmp_path_factory.mktemp("model")), metrics_names="skiff,vllm") as front:
        yield front


@pytest.fixture(scope="module")
def pages(front: Frontend) -> list[list[Sample]]:
    """The samples of a server that answered one request of two choices, in both formats."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, "/v1/completions", model=NAME, prompt="The boat", n=2, max_tokens=8)
        first, second = front.rank.request(), front.rank.request()
        front.rank.start(first, second)
        front.rank.generate(first.uid, "The boat", FinishReason.LENGTH)
        front.rank.generate(second.uid, "The boat The boat", FinishReason.LENGTH)
        assert pending.result().status_code == 200
    front.rank.step([], stats=STATS)
    while front.metric("skiff_requests_queued") != STATS.queued:
        pass  # the step is on its way
    text = front.http.get(front.url + "/metrics")
    strict = front.http.get(
        front.url + "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"}
    )
    parsed = (
        text_string_to_metric_families(text.text),
        openmetrics.text_string_to_metric_families(strict.text),  # type: ignore[no-untyped-call]
    )
    return [[sample for family in families for sample in family.samples] for families in parsed]


@pytest.mark.parametrize("name", SELECTED)
def test_each_series_of_the_dashboards_has_data(pages: list[list[Sample]], name: str) -> None:
    for samples in pages:
        found = [each for each in samples if each.name == name and each.labels["model_name"] == NAME]
        assert found and max(each.value for each in found) > 0
        assert all(SELECTED[name] <= set(each.labels) for each in found)
