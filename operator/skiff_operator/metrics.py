"""The operator's metrics, each defined once under its name in `skiff_runtime.contract`."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from skiff_operator.cache import Cache
from skiff_operator.startup import STEPS
from skiff_operator.status import CONDITIONS, DEGRADED, READY
from skiff_operator.watch_streams import WatchStreams
from skiff_runtime import contract

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, useless series per counter

registry: Final = CollectorRegistry()
ProcessCollector(registry=registry)

reconciles: Final = Counter(
    contract.OPERATOR_RECONCILES.removesuffix("_total"),
    "Reconciles by result: done, retry (temporary error), refused (permanent error) or bug.",
    ["result"],
    registry=registry,
)
reconcile_duration: Final = Histogram(
    contract.OPERATOR_RECONCILE_DURATION,
    "Seconds of one reconcile.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=registry,
)
queue_depth: Final = Gauge(
    contract.OPERATOR_QUEUE_DEPTH, "InferenceServices that wait to be reconciled.", registry=registry
)
leader: Final = Gauge(
    contract.OPERATOR_LEADER, "1 while this process holds the Lease, else 0.", registry=registry
)
last_resync: Final = Gauge(
    contract.OPERATOR_LAST_RESYNC, "Unix time of the last resync that finished.", registry=registry
)
api_requests: Final = Counter(
    contract.OPERATOR_API_REQUESTS.removesuffix("_total"),
    "Requests of the reconciler to the API server by method and status code; watches are not counted.",
    ["method", "code"],
    registry=registry,
)
pod_startup: Final = Histogram(
    contract.OPERATOR_POD_STARTUP,
    "Seconds of each step of a pod's start, once for each pod that became ready; ready: from its creation.",
    ["phase"],
    buckets=(0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600),
    registry=registry,
)
scalings: Final = Counter(
    contract.OPERATOR_SCALINGS.removesuffix("_total"),
    "Changes of the number of pods that autoscaling made, by direction.",
    ["direction"],
    registry=registry,
)
load_readings: Final = Counter(
    contract.OPERATOR_LOAD_READINGS.removesuffix("_total"),
    "Readings of pods' load for autoscaling by result: answered or silent.",
    ["result"],
    registry=registry,
)
adapter_requests: Final = Counter(
    contract.OPERATOR_ADAPTER_REQUESTS.removesuffix("_total"),
    "Requests to pods to load or unload a LoRA adapter, by action and result: done, failed or refused.",
    ["action", "result"],
    registry=registry,
)
for _action in ("load", "unload"):
    for _result in ("done", "failed", "refused"):
        adapter_requests.labels(_action, _result)
for _direction in ("up", "down"):
    scalings.labels(_direction)
for _result in ("answered", "silent"):
    load_readings.labels(_result)
for _step in STEPS:
    pod_startup.labels(_step)
for _result in ("done", "retry", "refused", "bug"):
    reconciles.labels(_result)


class ObjectsCollector(Collector):
    """Counts InferenceServices by condition, from the cache, at each scrape."""

    def __init__(self, cache: Cache) -> None:
        """Count the entries of `cache`."""
        self._cache = cache

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one series per condition and status, and a few per InferenceService."""
        counts = {(kind, status): 0 for kind in CONDITIONS for status in ("True", "False", "Unknown")}
        ready = GaugeMetricFamily(
            contract.OPERATOR_SERVICE_READY,
            "1 while the InferenceService is Ready, else 0.",
            labels=["service_namespace", "service"],
        )
        degraded = GaugeMetricFamily(
            contract.OPERATOR_SERVICE_DEGRADED,
            "1 for each InferenceService that is Degraded, with the reason.",
            labels=["service_namespace", "service", "reason"],
        )
        rolling_out = GaugeMetricFamily(
            contract.OPERATOR_SERVICE_ROLLING_OUT,
            "1 while a revision of the InferenceService is being rolled out, else 0.",
            labels=["service_namespace", "service"],
        )
        adapters = GaugeMetricFamily(
            contract.OPERATOR_SERVICE_ADAPTERS,
            "LoRA adapters of the InferenceService: those that every ready pod answers for, and the others.",
            labels=["service_namespace", "service", "ready"],
        )
        restarts = CounterMetricFamily(
            contract.OPERATOR_RESTARTS.removesuffix("_total"),
            "Restarts of containers in the pods of the InferenceService.",
            labels=["service_namespace", "service"],
        )
        for namespace, name in self._cache:
            entry = self._cache.get((namespace, name))
            status = entry.status if entry else None
            for kind in CONDITIONS:
                condition = status.condition(kind) if status else None
                value = condition.status if condition else "Unknown"
                counts[(kind, value)] += 1
                if kind == READY:
                    ready.add_metric([namespace, name], float(value == "True"))
                if kind == DEGRADED and condition is not None and value == "True":
                    degraded.add_metric([namespace, name, condition.reason], 1)
            rolling_out.add_metric([namespace, name], float(status is not None and status.rolling_out))
            restarts.add_metric([namespace, name], entry.restarts if entry else 0)
            if entry is not None and entry.adapters:
                loaded = sum(each.ready for each in entry.adapters)
                adapters.add_metric([namespace, name, "true"], loaded)
                adapters.add_metric([namespace, name, "false"], len(entry.adapters) - loaded)
        objects = GaugeMetricFamily(
            contract.OPERATOR_OBJECTS, "InferenceServices by condition.", labels=["condition", "status"]
        )
        for labels, count in counts.items():
            objects.add_metric(list(labels), count)
        yield from (objects, ready, degraded, rolling_out, adapters, restarts)


class StreamsCollector(Collector):
    """Reports the progress of the watch streams at the time of a scrape."""

    def __init__(self, streams: WatchStreams) -> None:
        """Report `streams`."""
        self._streams = streams

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one series per stream and metric; the namespace is empty where a stream covers all of them."""
        labels = ["resource", "watch_namespace"]
        silence = GaugeMetricFamily(
            contract.OPERATOR_WATCH_SILENCE,
            "Seconds since a watch last showed an event, a bookmark or any other answer.",
            labels=labels,
        )
        for (kind, namespace), seconds in self._streams.silences():
            silence.add_metric([kind.plural, namespace or ""], seconds)
        lists = CounterMetricFamily(
            contract.OPERATOR_WATCH_LISTS.removesuffix("_total"),
            "Lists that came to their end: one at start, and one each time that a watch could not go on.",
            labels=labels,
        )
        for (kind, namespace), count in self._streams.lists():
            lists.add_metric([kind.plural, namespace or ""], count)
        yield silence
        yield lists


def page() -> bytes:
    """Render the page that Prometheus scrapes."""
    return generate_latest(registry)
