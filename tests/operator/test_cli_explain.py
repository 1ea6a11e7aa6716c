"""`skiff explain`: the rendering of many situations."""

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from services import service

from skiff_operator.capacity import PlacedPod, read_node, requests
from skiff_operator.cli.capacity import NodeRoom, measure
from skiff_operator.cli.explain import Event, Pod, Snapshot, render
from skiff_operator.failure import REMEDIES
from skiff_operator.rollout_analysis import OBSERVING, Analysis, Figures
from skiff_operator.startup import PodStartup
from skiff_operator.status import AdapterStatus, Facts, Problem, Scaling, report
from skiff_operator.workload import Crash, PodState, Rollout

NOW = "2026-01-01T00:00:00Z"
HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQr"
CRASH = Crash(
    reason="UnsupportedModel",
    exit_code=2,
    log_tail="skiff: architecture MambaForCausalLM is not supported",
    at=NOW,
    remedy=REMEDIES["UnsupportedModel"],
)
STARTUP = PodStartup(pod="llama-0", revision="old", at=NOW, loaded_seconds=4.25, ready_seconds=61.0)
ANALYSIS = Analysis(
    phase=OBSERVING,
    candidate=Figures(revision="new", requests=120, failed_requests=31, ttft_p90_seconds=0.25),
    baseline=Figures(revision="old", requests=400),
    until=NOW,
)

ADAPTERS = (
    AdapterStatus(name="sql", uri="hf://org/sql", ready=True, loaded_pods=1, reason="Loaded"),
    AdapterStatus(name="bad", uri="hf://org/bad", source="team", reason="AdapterRefused", message="rank 64"),
)


def pod(name: str = "llama-1", *, age: float = 30.0, **fields: Any) -> Pod:
    """A pod of the new revision that loads its model."""
    values: dict[str, Any] = {"revision": "new", "ready": False, "phase": "Loading", **fields}
    return Pod(state=PodState(name=name, uid=name, **values), node="node-1", age_seconds=age, restarts=0)


def snapshot(
    *pods: Pod, problem: Problem | None = None, shortage: str = "", paused: bool = False, **fields: Any
) -> Snapshot:
    """One replica with these pods, and the status that the operator would report."""
    facts = Facts(
        name="llama",
        generation=1,
        replicas=1,
        revision="new",
        url="http://llama.default.svc/v1",
        synced=problem is None,
        rollout=Rollout(desired=1),
        pods=tuple(each.state for each in pods),
        problem=problem,
        shortage=shortage,
        paused=paused,
    )
    kept = {name: fields.pop(name, None) for name in ("startup", "analysis", "autoscaling")}
    kept["adapters"] = fields.pop("adapters", ())
    status = msgspec.structs.replace(report(facts, None, NOW), **kept)
    given: dict[str, Any] = {
        "service": service(),
        "status": status,
        "gpu_resource": "nvidia.com/gpu",
        **fields,
    }
    return Snapshot(namespace="default", name="llama", generation=1, pods=pods, **given)


LACKS = pod(phase="Scheduling", trouble="InsufficientGPU", message="0/2 nodes: 2 Insufficient nvidia.com/gpu")
GPU = "nvidia.com/gpu"


def node(name: str, gpus: int, *, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A node as the API server has it."""
    meta = {"name": name, "labels": labels or {}}
    return {"metadata": meta, "spec": spec, "status": {"allocatable": {GPU: str(gpus), "pods": "110"}}}


def room(name: str, free: int, **fields: Any) -> NodeRoom:
    """A node with eight GPUs, `free` of them unused."""
    taken = PlacedPod({GPU: Decimal(8 - free)}, old=False)
    [found] = measure([read_node(node(name, 8, **fields))], {name: [taken]}, {})
    return found


NODES = (room("node-1", 0), room("node-2", 8, unschedulable=True, labels={f"{GPU}.product": "H100"}))
SITUATIONS = [
    (snapshot(pod(ready=True, phase="Serving")), ["default/llama is Ready", "Nothing: all is well."]),
    (snapshot(pod()), ["is not Ready: RolloutInProgress", "llama-1   Loading", "the server loads the model"]),
    (snapshot(pod(age=50), startup=STARTUP), ["began 50s ago; the last start took 61s", "loaded 4.2s, ready 61s"]),
    (snapshot(pod(age=900), startup=STARTUP), ["That is slow: look at the log."]),
    (snapshot(pod(phase="Fetching")), ["kubectl logs llama-1 -c fetch"]),
    (snapshot(pod(revision="old", ready=True, phase="Serving"), paused=True), ["kubectl skiff rollout resume llama"]),
    (snapshot(), ["is not Ready", "Wait: pods are about to be created"]),
    (snapshot(pod(trouble="CrashLoop", message="ended", crash=CRASH)), ["is not Ready: CrashLoop", REMEDIES["UnsupportedModel"][:40]]),
    (snapshot(pod(trouble="ImagePullFailed", message="no such image")), ["no such image", "Correct spec.runtime.image"]),
    (snapshot(pod(trouble="Preempted", message="by another")), ["kubectl describe pod"]),
    (snapshot(LACKS, nodes=NODES, needs_gpus=True), ["node-1   0      8", "H100   cordoned, not ready, or excluded", "Add or free GPUs"]),
    (snapshot(LACKS, nodes=None, needs_gpus=True), ["you may not list nodes"]),
    (snapshot(LACKS, nodes=(), needs_gpus=True), ["no node has any nvidia.com/gpu"]),
    (snapshot(pod(phase="Scheduling"), shortage="no schedulable node has 8"), ["NoNodeLargeEnough", "Lower spec.parallelism.tensor"]),
    (snapshot(problem=Problem("InvalidSpec", "spec.cache: set only one"), service=None), ["set only one", "Change spec as the message says"]),
    (snapshot(pod(), analysis=ANALYSIS), ["Analysis: Observing, until 2026", "new new 120 31 0.25s", "old old 400 0 -"]),
    (snapshot(pod(ready=True, phase="Serving"), adapters=ADAPTERS), ["bad LoRAAdapter team 0 AdapterRefused: rank 64", "sql spec.adapters 1 Loaded"]),
    (snapshot(status=None), ["no operator has reported on it", "Check that the operator runs"]),
]  # fmt: skip


@pytest.mark.parametrize(("of", "texts"), SITUATIONS)
def test_an_explanation_says_what_is_wrong_and_what_to_do(of: Snapshot, texts: list[str]) -> None:
    screen = " ".join(render(of, width=100).split())
    for text in texts:
        assert " ".join(text.split()) in screen, render(of, width=100)
    assert len(render(of, width=100).splitlines()) <= 40


def test_a_spec_that_the_operator_has_not_seen_is_not_explained_by_the_old_status() -> None:
    of = snapshot(pod(trouble="CrashLoop", message="ended", crash=CRASH))
    unseen = Snapshot(**{**{name: getattr(of, name) for name in of.__dataclass_fields__}, "generation": 2})
    assert "the operator has not seen this spec yet" in render(unseen, width=200)


def test_one_screen_holds_many_pods_and_events_and_no_secret() -> None:
    pods = [
        pod(f"llama-{index:02d}", trouble="CrashLoop", message="ended", crash=CRASH) for index in range(30)
    ]
    events = [
        Event(
            type="Warning",
            reason="BackOff",
            note=f"pulling with {HUB_TOKEN}",
            count=3,
            age_seconds=9,
        )
        for _ in range(30)
    ]
    log = tuple(f"line {index} Authorization: Bearer {HUB_TOKEN}" for index in range(100))
    screen = render(snapshot(*pods, events=tuple(events), log=log, container="runtime"), width=100)
    assert HUB_TOKEN not in screen
    assert "and 22 more" in screen and "line 99" in screen and "line 80 " not in screen
    assert len(screen.splitlines()) <= 60
    assert max(map(len, screen.splitlines())) <= 100


def test_free_resources_are_what_no_pod_requests() -> None:
    def takes(*units: int, init: int = 0, cpu: str = "1") -> PlacedPod:
        def of(count: int) -> dict[str, Any]:
            return {"resources": {"requests": {"cpu": cpu}, "limits": {GPU: str(count)}}}

        pod_spec = {"containers": [*map(of, units)], "initContainers": [of(init)]}
        return PlacedPod(requests(pod_spec), old=False)

    labels = {f"{GPU}.memory": "81559", "pool": "a"}
    nodes = [read_node(each) for each in (node("b", 4), node("a", 8, labels=labels), node("none", 0))]
    placed = {"a": [takes(1, 2), takes(1, init=3)], "gone": [takes(9)]}
    found = measure(nodes, placed, {"nodeSelector": {"pool": "a"}})
    assert [(each.node.name, each.admits, each.total(GPU), each.free_devices(GPU)) for each in found] == [
        ("a", True, 8, 2),
        ("b", False, 4, 4),
        ("none", False, 0, 0),
    ]
    assert found[0].gpu_memory_bytes(GPU) == found[0].gpu_memory_bytes(f"{GPU}.shared") == 81_559 << 20
    assert [each.pods({GPU: Decimal(1)}) for each in found] == [2, 0, 0]
    unknown = measure(nodes, None, {})
    assert [each.free_devices(GPU) for each in unknown] == [None] * 3


def test_autoscaling_and_its_last_change_are_in_the_headline() -> None:
    scaled = service(replicas=3, autoscaling={"minReplicas": 0, "maxReplicas": 8})
    assert "\n  autoscaled from 0 to 8\n" in render(snapshot(service=scaled), width=100)
    last = Scaling(3, "96 requests, 32 for each pod", NOW)
    text = render(snapshot(service=scaled, autoscaling=last), width=100)
    assert f"\n  autoscaled from 0 to 8: 3 since {NOW}, 96 requests, 32 for each pod\n" in text
