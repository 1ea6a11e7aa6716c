"""The operator's metrics of each InferenceService, which come from the cache at each scrape."""

from typing import Any

import pytest
from services import raw

from skiff_operator.cache import Cache
from skiff_operator.kinds import INFERENCE_SERVICE, POD
from skiff_operator.metrics import ObjectsCollector
from skiff_operator.observe import Observer
from skiff_operator.settings import Settings
from skiff_operator.status import DEGRADED, PROGRESSING, AdapterStatus, Condition, Status

OURS = {"service_namespace": "default", "service": "llama"}
ROLLING_OUT = "skiff_operator_inferenceservice_rolling_out"
RESTARTS = "skiff_operator_container_restarts_total"


@pytest.fixture
def observer() -> Observer:
    """An observer that knows one service."""
    observer = Observer(Cache(), Settings())
    observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    return observer


def series(observer: Observer, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of a metric."""
    families = ObjectsCollector(observer.cache).collect()
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in samples]


def conditions(**reasons: str) -> Status:
    """A status whose conditions are True, with these reasons."""
    listed = tuple(Condition(kind, "True", reason, "", "", 1) for kind, reason in reasons.items())
    return Status(1, 1, 0, 1, "", "", "r1", listed)


@pytest.mark.parametrize(
    ("reason", "value"),
    [("RolloutInProgress", 1), ("ProgressDeadlineExceeded", 1), ("PodsStarting", 0), ("RolloutComplete", 0)],
)
def test_a_rollout_is_reported_until_it_ends(observer: Observer, reason: str, value: int) -> None:
    assert series(observer, ROLLING_OUT) == [(OURS, 0)]
    observer.cache.get_or_create(("default", "llama")).status = conditions(**{PROGRESSING: reason})
    assert series(observer, ROLLING_OUT) == [(OURS, value)]


def test_only_what_is_degraded_has_a_series_with_its_reason(observer: Observer) -> None:
    name = "skiff_operator_inferenceservice_degraded"
    assert series(observer, name) == []
    entry = observer.cache.get_or_create(("default", "llama"))
    entry.status = conditions(**{DEGRADED: "InsufficientGPU"})
    assert series(observer, name) == [({**OURS, "reason": "InsufficientGPU"}, 1)]


def test_adapters_are_counted_where_there_are_some(observer: Observer) -> None:
    name = "skiff_operator_inferenceservice_adapters"
    assert series(observer, name) == []
    entry = observer.cache.get_or_create(("default", "llama"))
    entry.adapters = tuple(
        AdapterStatus(name=each, uri="hf://a/b", ready=each != "bad") for each in ("a", "b", "bad")
    )
    assert series(observer, name) == [({**OURS, "ready": "true"}, 2), ({**OURS, "ready": "false"}, 1)]


def test_restarts_are_counted_from_when_they_are_seen_and_outlive_their_pods(observer: Observer) -> None:
    def restarts(uid: str, count: int) -> float:
        observer.observe(POD, pod(uid, count), "MODIFIED")
        [(labels, value)] = series(observer, RESTARTS)
        assert labels == OURS
        return value

    assert restarts("p1", 7) == 0  # before this process watched
    assert restarts("p1", 9) == 2
    assert restarts("p2", 0) == 2
    assert restarts("p2", 1) == 3
    observer.observe(POD, pod("p2", 1), "DELETED")
    assert series(observer, RESTARTS) == [(OURS, 3)]


def pod(uid: str, restarts: int) -> dict[str, Any]:
    """A pod of the service's Deployment whose restarts are those of two containers."""
    counts = (restarts - restarts // 2, restarts // 2)
    statuses = [
        {"name": name, "image": "i", "restartCount": count}
        for name, count in zip(("runtime", "sidecar"), counts, strict=True)
    ]
    labels = {"serving.skiff.dev/inferenceservice": "llama", "pod-template-hash": "7d9f"}
    owner = {"kind": "ReplicaSet", "name": "llama-7d9f", "uid": "r", "controller": True}
    meta = {"name": "llama-7d9f-x", "uid": uid, "namespace": "default", "resourceVersion": "5"}
    return {
        "metadata": {**meta, "labels": labels, "ownerReferences": [owner]},
        "status": {"phase": "Running", "containerStatuses": statuses},
    }
