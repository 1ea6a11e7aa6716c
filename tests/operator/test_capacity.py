"""Room for one more pod: requests as the scheduler counts them, nodes that admit a pod, and what is missing."""

from decimal import Decimal
from typing import Any

import pytest

from skiff_operator import capacity
from skiff_operator.capacity import Node, PlacedPod, Room

GPU = "nvidia.com/gpu"


def needs(**amounts: Any) -> dict[str, Any]:
    """A container with these requests."""
    return {
        "resources": {"requests": {GPU if name == "gpu" else name: each for name, each in amounts.items()}}
    }


def node(name: str = "a", *, labels: dict[str, str] | None = None, taints: Any = (), **amounts: Any) -> Node:
    """A ready node, read from an object of the API server."""
    allocatable = {GPU if key == "gpu" else key: value for key, value in {"pods": "110", **amounts}.items()}
    return capacity.read_node(
        {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"taints": list(taints)},
            "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
        }
    )


def placed(*, old: bool = False, **amounts: Any) -> PlacedPod:
    """A pod on a node."""
    return PlacedPod(capacity.requests({"containers": [needs(**amounts)]}), old)


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"containers": [needs(cpu="500m"), needs(cpu=1, memory="1Gi")]}, {"cpu": "1.5", "memory": 2**30}),
        ({"containers": [{"resources": {"limits": {GPU: "2"}}}]}, {GPU: 2}),
        (
            {"initContainers": [needs(cpu=4)], "containers": [needs(cpu=1, memory="1M")]},
            {"cpu": 4, "memory": 10**6},
        ),
        (
            {
                "initContainers": [{**needs(cpu=1), "restartPolicy": "Always"}, needs(cpu=2)],
                "containers": [needs(cpu=1)],
            },
            {"cpu": 3},
        ),
        ({"containers": [needs(cpu=1)], "overhead": {"cpu": "250m"}}, {"cpu": "1.25"}),
        ({"containers": [needs(cpu=1)], "resources": {"requests": {"cpu": 3}}}, {"cpu": 3}),
    ],
)
def test_requests_are_counted_as_by_the_scheduler(pod: dict[str, Any], expected: dict[str, Any]) -> None:
    amounts = {name: Decimal(value) for name, value in expected.items()}
    assert capacity.requests(pod) == {**amounts, "pods": Decimal(1)}


IN_A = {"key": "zone", "operator": "In", "values": ["a"]}


def affinity(*terms: list[dict[str, Any]]) -> dict[str, Any]:
    """A pod with required node affinity."""
    found = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": found}}}


@pytest.mark.parametrize(
    ("pod", "admitted"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        (affinity([IN_A]), True),
        (affinity([{**IN_A, "operator": "NotIn"}]), False),
        (affinity([{**IN_A, "operator": "NotIn"}], [IN_A]), True),
        (affinity([IN_A, {"key": "gpus", "operator": "Gt", "values": ["8"]}]), False),
        (affinity([{"key": "gpus", "operator": "Lt", "values": ["9"]}]), True),
        (
            affinity([{"key": "none", "operator": "DoesNotExist"}, {"key": "gpus", "operator": "Exists"}]),
            True,
        ),
        (affinity([]), False),
    ],
)
def test_labels_decide(pod: dict[str, Any], admitted: bool) -> None:
    assert capacity.admits(node(labels={"zone": "a", "gpus": "8"}), pod) is admitted


@pytest.mark.parametrize(
    ("tolerations", "admitted"),
    [
        ([], False),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "value": "yes", "effect": "NoSchedule"}], True),
        ([{"key": "gpu", "value": "no"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"operator": "Exists"}], True),
    ],
)
def test_taints_decide(tolerations: list[dict[str, Any]], admitted: bool) -> None:
    taints = [
        {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
    ]
    assert capacity.admits(node(taints=taints), {"tolerations": tolerations}) is admitted


def test_a_cordoned_or_dead_node_has_no_room() -> None:
    dead = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    for spec, status in (({"unschedulable": True}, {}), ({}, dead)):
        assert not capacity.admits(
            capacity.read_node({"metadata": {"name": "a"}, "spec": spec, "status": status}), {}
        )


WANTED = capacity.requests({"containers": [needs(gpu=1, cpu=4, memory="16Gi")]})
LARGE: dict[str, Any] = {"gpu": 8, "cpu": 64, "memory": "512Gi"}


@pytest.mark.parametrize(
    ("nodes", "room"),
    [
        ([(node(**LARGE), [])], Room(True, True)),
        ([(node(**LARGE), [placed(gpu=8)]), (node("b", **LARGE), [placed(gpu=7)])], Room(True, True)),
        (
            [(node(**LARGE), [placed(gpu=7), placed(gpu=1, cpu=4, memory="16Gi", old=True)])],
            Room(False, True, f"needs 1 {GPU}, 0 free"),
        ),
        ([(node(**LARGE), [placed(gpu=8)])], Room(False, False, f"needs 1 {GPU}, 0 free")),
        (
            [(node(**LARGE), [placed(cpu=62, memory="500.5Gi", old=True)])],
            Room(False, True, "needs 4 cpu, 2 free, needs 16Gi memory, 11.5Gi free"),
        ),
        (
            [(node(**LARGE), [placed(gpu=8, cpu=64)]), (node("b", **LARGE), [placed(gpu=8)])],
            Room(False, False, f"needs 1 {GPU}, 0 free"),
        ),
        ([(node(**{**LARGE, "pods": 1}), [placed(old=True)])], Room(False, True, "needs 1 pods, 0 free")),
        ([], Room(False, False, "no node admits the pod")),
    ],
)
def test_room_beside_or_instead(nodes: list[tuple[Node, list[PlacedPod]]], room: Room) -> None:
    assert capacity.find_room(WANTED, nodes) == room


def test_a_pod_fits_in_place_if_it_needs_no_more() -> None:
    old = {"containers": [needs(gpu=1, cpu=4)], "nodeSelector": {"pool": "a"}}
    added = [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}]
    assert capacity.fits_in_place(old, {**old, "tolerations": added})
    assert capacity.fits_in_place({**old, "containers": [needs(gpu=1, cpu=3)]}, old)
    assert not capacity.fits_in_place({**old, "containers": [needs(gpu=2, cpu=4)]}, old)
    assert not capacity.fits_in_place({**old, "nodeSelector": {"pool": "b"}}, old)
    assert not capacity.fits_in_place({**old, "tolerations": [{"key": "gpu", "operator": "Exists"}]}, old)
