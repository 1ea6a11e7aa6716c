"""The important metrics under vLLM's names, for dashboards and routers that read those (``--metrics-names skiff,vllm``).

They are computed from the runtime's own families at each scrape, and nothing is counted twice. Series are summed over the
labels that vLLM does not have; every series has vLLM's labels ``model_name`` and ``engine``. Histograms keep the bounds of
the runtime's own.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric, Sample

from skiff_runtime import contract
from skiff_runtime.metrics.families import MetricFamily

NAMES: Final = {
    "vllm:num_requests_running": contract.METRIC_RUNNING,
    "vllm:num_requests_waiting": contract.METRIC_QUEUED,
    "vllm:kv_cache_usage_perc": contract.METRIC_KV_CACHE_USAGE,
    "vllm:prefix_cache_queries_total": contract.METRIC_PREFIX_CACHE_QUERIES,
    "vllm:prefix_cache_hits_total": contract.METRIC_PREFIX_CACHE_HITS,
    "vllm:num_preemptions_total": contract.METRIC_PREEMPTIONS,
    "vllm:prompt_tokens_total": contract.METRIC_PROMPT_TOKENS,
    "vllm:prompt_tokens_cached_total": contract.METRIC_CACHED_TOKENS,
    "vllm:generation_tokens_total": contract.METRIC_GENERATION_TOKENS,
    "vllm:request_success_total": contract.METRIC_FINISHED,
    "vllm:time_to_first_token_seconds": contract.METRIC_TTFT,
    "vllm:inter_token_latency_seconds": contract.METRIC_ITL,
    "vllm:time_per_output_token_seconds": contract.METRIC_ITL,
    "vllm:e2e_request_latency_seconds": contract.METRIC_E2E_LATENCY,
    "vllm:request_queue_time_seconds": contract.METRIC_QUEUE_TIME,
    "vllm:request_prefill_time_seconds": contract.METRIC_PREFILL_TIME,
    "vllm:request_decode_time_seconds": contract.METRIC_DECODE_TIME,
    "vllm:request_inference_time_seconds": contract.METRIC_INFERENCE_TIME,
    "vllm:request_time_per_output_token_seconds": contract.METRIC_TPOT,
    "vllm:request_prompt_tokens": contract.METRIC_REQUEST_PROMPT_TOKENS,
    "vllm:request_generation_tokens": contract.METRIC_REQUEST_GENERATION_TOKENS,
    "vllm:request_max_num_generation_tokens": contract.METRIC_REQUEST_LONGEST_CHOICE,
    "vllm:request_params_n": contract.METRIC_REQUEST_CHOICES,
    "vllm:request_params_max_tokens": contract.METRIC_REQUEST_MAX_TOKENS,
    "vllm:iteration_tokens_total": contract.METRIC_STEP_TOKENS,
    "vllm:cache_config_info": contract.ROUTING_CACHE_INFO,
}
"""vLLM's names, and the runtime's of the same quantity. ``time_per_output_token_seconds`` is the name that
``inter_token_latency_seconds`` had until vLLM 0.11; many dashboards still read it."""
LORA_INFO: Final = "vllm:lora_requests_info"
"""Adapters in use, which the endpoint picker of the Gateway API Inference Extension reads."""
_LABELS: Final = {
    "le": "le",
    "finish_reason": "finished_reason",
    "page_size": "block_size",
    "num_pages": "num_gpu_blocks",
}
"""The runtime's labels that have a counterpart in vLLM."""


@dataclass(frozen=True, slots=True)
class VllmNames:
    """Translates families into vLLM's, for the model ``model_name``."""

    model_name: str

    @property
    def _labels(self) -> dict[str, str]:
        """The labels of every series."""
        return {"model_name": self.model_name, "engine": "0"}

    def translate(self, families: Iterable[MetricFamily]) -> Iterator[Metric]:
        """Yield a family for each of vLLM's names."""
        by_name = {family.name: family for family in families}
        for name, own in NAMES.items():
            yield self._rename(by_name[own], name)

    def describe_adapters(self, max_loras: int, *, running: list[str], waiting: list[str]) -> Metric:
        """Return the names of the adapters of running and of waiting requests; the value is the present Unix time."""
        lora = Metric(LORA_INFO, "Adapters of running and of waiting requests.", "gauge")
        labels = {
            "max_lora": str(max_loras),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
        }
        lora.add_sample(LORA_INFO, {**self._labels, **labels}, time.time())
        return lora

    def _rename(self, family: MetricFamily, name: str) -> Metric:
        source = family.collect()
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in source.samples:
            labels = list(self._labels.items())
            labels += [(_LABELS[key], text) for key, text in sample.labels.items() if key in _LABELS]
            series = name + sample.name.removeprefix(family.name), tuple(labels)
            values[series] = values.get(series, 0.0) + sample.value
        family_name = name.removesuffix("_total") if source.type == "counter" else name
        metric = Metric(family_name, source.documentation, source.type)
        metric.samples = [Sample(series, dict(labels), value) for (series, labels), value in values.items()]
        return metric
