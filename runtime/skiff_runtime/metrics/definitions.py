"""Definitions of all metrics of the runtime, and the collector that exposes them to Prometheus."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from skiff_runtime import contract
from skiff_runtime.messages import FinishReason, StepStats, Usage
from skiff_runtime.metrics.families import Counter, Gauge, Histogram, HistogramSeries, MetricFamily
from skiff_runtime.metrics.labels import (
    FINISH_REASONS,
    AbortReason,
    Endpoint,
    Outcome,
    RejectionReason,
    StepKind,
)
from skiff_runtime.metrics.vllm_names import VllmNames

TTFT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
_DURATION: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_QUEUE: Final = (0.0005, 0.001, 0.0025, *TTFT_BUCKETS)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LENGTHS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_CHOICES: Final = (1, 2, 5, 10, 20)
_TOKENS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


_REFUSALS: Final = {
    401: RejectionReason.UNAUTHORIZED,
    403: RejectionReason.FORBIDDEN,
    404: RejectionReason.NOT_FOUND,
    408: RejectionReason.TOO_SLOW,
    413: RejectionReason.TOO_LARGE,
    429: RejectionReason.QUEUE_FULL,
    503: RejectionReason.UNAVAILABLE,
}
"""By HTTP status; every other status is ``INVALID``."""


class _Gauges:
    """Gauges, whose values are set at each scrape. ``max_loras``: the number of LoRA slots."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self.queued = Gauge(contract.METRIC_QUEUED, "Waiting requests.")
        self.running = Gauge(contract.METRIC_RUNNING, "Running requests.")
        self.in_flight = Gauge(contract.METRIC_IN_FLIGHT, "Accepted requests that have not ended.")
        self.queued_tokens = Gauge(contract.METRIC_QUEUED_TOKENS, "Prompt tokens of waiting requests.")
        self.connections = Gauge(contract.METRIC_CONNECTIONS, "Open HTTP connections.")
        self.ready = Gauge(contract.METRIC_READY, "1 while new requests are accepted, else 0.")
        self.usage = Gauge(
            contract.METRIC_KV_CACHE_USAGE, "Fraction of the KV cache that running requests occupy."
        )
        self.pages = Gauge(contract.METRIC_KV_CACHE_PAGES, "Pages of the KV cache by state.", ("state",))
        self.phases = Gauge(contract.METRIC_START_PHASE, "Duration of each phase of the start.", ("phase",))
        self.graphs_pending = Gauge(
            contract.METRIC_GRAPHS_PENDING,
            "CUDA graphs that are not captured yet; steps of their sizes run without one.",
        )
        self.up = Gauge(contract.METRIC_PROCESS_UP, "1 while the process runs, else 0.", ("process",))
        self.silent = Gauge(
            contract.METRIC_HEARTBEAT_AGE, "Seconds since the last heartbeat of the process.", ("process",)
        )
        self.adapters = Gauge(contract.METRIC_ADAPTERS, "LoRA adapters that requests may choose.")
        self.lora_slots = Gauge(
            contract.METRIC_LORA_SLOTS,
            "LoRA slots by state: used by running requests, idle with an adapter, or empty.",
            ("state",),
        )
        self.routing_queued = Gauge(contract.ROUTING_QUEUED, "Waiting requests, for routers.")
        self.routing_running = Gauge(contract.ROUTING_RUNNING, "Running requests, for routers.")
        self.routing_usage = Gauge(contract.ROUTING_USAGE, "Fraction of the KV cache in use, for routers.")
        self.routing_cache = Gauge(
            contract.ROUTING_CACHE_INFO, "Size of the KV cache, for routers.", ("page_size", "num_pages")
        )

    def set(self, stats: StepStats) -> None:
        """Set the scheduler's gauges from its statistics."""
        used = stats.pages_total - stats.pages_free - stats.pages_cached
        usage = used / stats.pages_total if stats.pages_total else 0.0
        for queued in (self.queued, self.routing_queued):
            queued.set(stats.queued)
        self.queued_tokens.set(stats.queued_tokens)
        for running in (self.running, self.routing_running):
            running.set(stats.running)
        for share in (self.usage, self.routing_usage):
            share.set(usage)
        self.graphs_pending.set(stats.graphs_pending)
        for state, pages in (("free", stats.pages_free), ("cached", stats.pages_cached), ("used", used)):
            self.pages.set(pages, state)
        used_slots, resident = len(stats.running_adapters), len(stats.resident_adapters)
        self.lora_slots.set(used_slots, "used")
        self.lora_slots.set(resident - used_slots, "idle")
        self.lora_slots.set(max(0, self._max_loras - resident), "empty")
        self.routing_cache.clear()
        self.routing_cache.set(1, str(stats.page_size), str(stats.pages_total))


class Metrics(Collector):
    """The metrics of one service.

    The callables are evaluated at each scrape, for the gauges whose values other objects own. ``heartbeats`` returns
    name, whether it runs, and seconds since its last heartbeat, of each process. With ``vllm_names``, the important ones are
    exposed under vLLM's names, too. ``max_loras``: the number of LoRA slots; ``adapter_names`` returns the names of adapters by
    their ids.
    """

    def __init__(
        self,
        *,
        vllm_names: VllmNames | None = None,
        in_flight: Callable[[], int],
        connections: Callable[[], int],
        ready: Callable[[], bool],
        phase_seconds: Callable[[], dict[str, float]],
        heartbeats: Callable[[], list[tuple[str, bool, float]]],
        max_loras: int = 0,
        num_adapters: Callable[[], int] = lambda: 0,
        adapter_names: Callable[[Sequence[int]], list[str]] = lambda _: [],
    ) -> None:
        self._vllm_names = vllm_names
        self._in_flight = in_flight
        self._connections = connections
        self._ready = ready
        self._heartbeats = heartbeats
        self._phase_seconds = phase_seconds
        self._stats = StepStats()
        self._max_loras = max_loras
        self._num_adapters = num_adapters
        self._adapter_names = adapter_names
        self._gauges = _Gauges(max_loras)
        self._define_requests()
        self._define_tokens()
        self._define_steps()
        self.ttft: HistogramSeries = self._ttft.of()
        self.itl: HistogramSeries = self._itl.of()

    def _define_requests(self) -> None:
        self._requests = Counter(
            contract.METRIC_REQUESTS, "Requests by outcome and endpoint.", ("outcome", "endpoint")
        )
        for outcome in Outcome:
            for endpoint in Endpoint:
                self._requests.add(0, outcome, endpoint)
        self._refused = Counter(contract.METRIC_REJECTED, "Rejected requests, by reason.", ("reason",))
        for reason in RejectionReason:
            self._refused.add(0, reason)
        self._finished = Counter(
            contract.METRIC_FINISHED,
            "Requests that ended with a response, by the finish reason of their last choice.",
            ("finish_reason",),
        )
        for finish in FINISH_REASONS.values():
            self._finished.add(0, finish)
        self._duration = Histogram(
            contract.METRIC_E2E_LATENCY,
            "Time from the request to its last token, of finished requests.",
            _DURATION,
            ("endpoint",),
            [(endpoint,) for endpoint in Endpoint],
        )
        self._ttft = Histogram(
            contract.METRIC_TTFT, "Time from the request to its first token.", TTFT_BUCKETS
        )
        self._itl = Histogram(
            contract.METRIC_ITL, "Time between consecutive tokens of a request.", ITL_BUCKETS
        )
        self._queue_time = Histogram(
            contract.METRIC_QUEUE_TIME,
            "Time from the arrival of a request at the scheduler until it first runs.",
            _QUEUE,
        )
        self._prefill_time = Histogram(
            contract.METRIC_PREFILL_TIME, "Time from a choice's first step to its first token.", _QUEUE
        )
        self._decode_time = Histogram(
            contract.METRIC_DECODE_TIME, "Time from a choice's first token to its last one.", _DURATION
        )
        self._inference_time = Histogram(
            contract.METRIC_INFERENCE_TIME, "Time from a choice's first step to its last token.", _DURATION
        )
        self._tpot = Histogram(
            contract.METRIC_TPOT,
            "Mean time between the tokens of a choice, of choices with more than one token.",
            ITL_BUCKETS,
        )
        self._key_reloads = Counter(
            contract.METRIC_KEY_RELOADS, "Reads of a changed key file, by outcome.", ("flag", "outcome")
        )
        self._keys_current = Gauge(
            contract.METRIC_KEYS_CURRENT,
            "1 while the keys of the key file are in force, 0 while it cannot be used and earlier ones are.",
            ("flag",),
        )
        self._aborted = Counter(contract.METRIC_ABORTS, "Requests that were aborted, by cause.", ("reason",))
        for why in AbortReason:
            self._aborted.add(0, why)

    def _define_tokens(self) -> None:
        self._prompt = Counter(contract.METRIC_PROMPT_TOKENS, "Prompt tokens of ended requests.")
        self._cached = Counter(
            contract.METRIC_CACHED_TOKENS, "Prompt tokens of ended requests that the prefix cache contained."
        )
        self._generated = Counter(contract.METRIC_GENERATION_TOKENS, "Generated tokens.")
        self._prompt_lengths = Histogram(
            contract.METRIC_REQUEST_PROMPT_TOKENS, "Prompt tokens per ended request.", _LENGTHS
        )
        self._answer_lengths = Histogram(
            contract.METRIC_REQUEST_GENERATION_TOKENS, "Generated tokens per ended request.", _LENGTHS
        )
        self._longest_choice = Histogram(
            contract.METRIC_REQUEST_LONGEST_CHOICE,
            "Generated tokens of the longest choice per finished request.",
            _LENGTHS,
        )
        self._num_choices = Histogram(
            contract.METRIC_REQUEST_CHOICES, "Parameter n per finished request.", _CHOICES
        )
        self._max_tokens = Histogram(
            contract.METRIC_REQUEST_MAX_TOKENS, "Parameter max_tokens per finished request.", _LENGTHS
        )
        self._lookup = Counter(
            contract.METRIC_PREFIX_CACHE_QUERIES, "Prompt tokens that were looked up in the prefix cache."
        )
        self._hit = Counter(
            contract.METRIC_PREFIX_CACHE_HITS, "Prompt tokens that the prefix cache contained at lookup."
        )

    def _define_steps(self) -> None:
        kinds = [(kind,) for kind in StepKind]
        self._steps = Histogram(contract.METRIC_STEP_DURATION, "Duration of a step.", _STEP, ("kind",), kinds)
        self._step_tokens = Histogram(contract.METRIC_STEP_TOKENS, "Tokens computed in a step.", _TOKENS)
        self._prefill_rows = Histogram(
            contract.METRIC_PREFILL_BATCH,
            "Requests with prompt tokens in a step, of steps that have any.",
            _ROWS,
        )
        self._decode_rows = Histogram(
            contract.METRIC_DECODE_BATCH, "Decoding requests in a step, of steps that have any.", _ROWS
        )
        self._retracted = Counter(
            contract.METRIC_PREEMPTIONS, "Running requests that were preempted to free KV pages."
        )
        self._evicted = Counter(
            contract.METRIC_EVICTED_PAGES, "Pages that were evicted from the prefix cache."
        )
        self._adapter_reads = Counter(
            contract.METRIC_ADAPTER_READS, "LoRA adapters that were read into host memory."
        )
        self._adapter_loads = Counter(
            contract.METRIC_ADAPTER_LOADS, "LoRA adapters that were copied into a LoRA slot."
        )
        self._adapter_evictions = Counter(
            contract.METRIC_ADAPTER_EVICTIONS,
            "LoRA adapters that were replaced in a LoRA slot by another one.",
        )
        self._corrupted = Counter(
            contract.METRIC_CORRUPTED, "Requests that failed because their logits contained NaN."
        )

    def record_request(self, endpoint: Endpoint, outcome: Outcome, seconds: float) -> None:
        """Count a request that has ended after ``seconds``."""
        self._requests.add(1, outcome, endpoint)
        if outcome is Outcome.FINISHED:
            self._duration.of(endpoint).observe(seconds)

    def record_finish(self, finish: FinishReason) -> None:
        """Count a request that has ended with a response."""
        self._finished.add(1, FINISH_REASONS[finish])

    def record_rejection(self, status: int) -> None:
        """Count a request that was rejected with an HTTP status."""
        self._refused.add(1, _REFUSALS.get(status, RejectionReason.INVALID))

    def record_key_reload(self, flag: str, *, success: bool) -> None:
        """Count a read of the key file that ``flag`` names; its first one is a success."""
        self._key_reloads.add(1, flag, "success" if success else "failure")
        self._keys_current.set(int(success), flag)

    def record_abort(self, reason: AbortReason) -> None:
        """Count an aborted request."""
        self._aborted.add(1, reason)

    def record_usage(self, usage: Usage) -> None:
        """Count the tokens of a request that has ended."""
        self._prompt.add(usage.prompt_tokens)
        self._cached.add(usage.cached_tokens)
        self._prompt_lengths.of().observe(usage.prompt_tokens)
        self._answer_lengths.of().observe(usage.completion_tokens)

    def record_generation(self, *, longest_choice: int, choices: int, max_tokens: int) -> None:
        """Count the size of a finished request that generated text: tokens of its longest choice, and its parameters."""
        self._longest_choice.of().observe(longest_choice)
        self._num_choices.of().observe(choices)
        self._max_tokens.of().observe(max_tokens)

    def record_choice_times(
        self, *, started_at: float, first_token_at: float, last_token_at: float, tokens: int
    ) -> None:
        """Count the times of a choice that has ended with ``tokens`` tokens, at least one. All moments are on one clock.

        ``started_at`` is 0 if it is not known.
        """
        decode_seconds = last_token_at - first_token_at
        self._decode_time.of().observe(decode_seconds)
        if tokens > 1:
            self._tpot.of().observe(decode_seconds / (tokens - 1))
        if started_at:
            self._prefill_time.of().observe(first_token_at - started_at)
            self._inference_time.of().observe(last_token_at - started_at)

    def record_kv_capacity(self, kv_tokens: int, page_size: int) -> None:
        """Report the whole KV cache as free, until the first step reports its state."""
        if not self._stats.pages_total:
            pages = kv_tokens // page_size
            self._stats = StepStats(pages_total=pages, pages_free=pages, page_size=page_size)

    def record_step(self, stats: StepStats, *, generated: int) -> None:
        """Record the statistics of a step that has ended, and the number of tokens that it generated."""
        self._stats = stats
        self._generated.add(generated)
        self._retracted.add(stats.preempted)
        self._evicted.add(stats.evicted_pages)
        self._corrupted.add(stats.corrupted)
        self._adapter_reads.add(stats.adapter_reads)
        self._adapter_loads.add(stats.adapter_loads)
        self._adapter_evictions.add(stats.adapter_evictions)
        self._lookup.add(stats.lookup_tokens)
        self._hit.add(stats.hit_tokens)
        for seconds in stats.queue_seconds:
            self._queue_time.of().observe(seconds)
        if stats.prefill_rows:
            self._prefill_rows.of().observe(stats.prefill_rows)
        if stats.decode_tokens:
            self._decode_rows.of().observe(stats.decode_tokens)
        kind = step_kind(stats)
        if kind is not None:
            self._steps.of(kind).observe(stats.step_seconds)
            self._step_tokens.of().observe(stats.prefill_tokens + stats.decode_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, with the gauges of this moment."""
        self._gauges.set(self._stats)
        self._gauges.in_flight.set(self._in_flight())
        self._gauges.ready.set(int(self._ready()))
        self._gauges.connections.set(self._connections())
        self._gauges.adapters.set(self._num_adapters())
        for phase, seconds in self._phase_seconds().items():
            self._gauges.phases.set(seconds, phase)
        for process, running, silent in self._heartbeats():
            self._gauges.up.set(int(running), process)
            self._gauges.silent.set(silent, process)
        families = self.families()
        for family in families:
            yield family.collect()
        if self._vllm_names is not None:
            yield from self._vllm_names.translate(families)
            yield self._vllm_names.describe_adapters(
                self._max_loras,
                running=self._adapter_names(self._stats.running_adapters),
                waiting=self._adapter_names(self._stats.waiting_adapters),
            )

    def families(self) -> list[MetricFamily]:
        """Return every metric family."""
        owners = (vars(self), vars(self._gauges))
        return [each for owner in owners for each in owner.values() if isinstance(each, MetricFamily)]


def step_kind(stats: StepStats) -> StepKind | None:
    """Classify a step by the tokens it computed; None if it computed none."""
    if stats.prefill_tokens:
        return StepKind.MIXED if stats.decode_tokens else StepKind.PREFILL
    return StepKind.DECODE if stats.decode_tokens else None
