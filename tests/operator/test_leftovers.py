"""Children that the garbage collector overlooked are deleted once their InferenceService is provably gone; no other is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from apiserver import ApiServer
from controlplane import ControlPlane
from operator_checks import CHILDREN, create, resynced
from operator_process import OperatorProcess, eventually
from services import raw, service
from strangers import conflicts, inference_service

from skiff_operator import ownership, plan
from skiff_operator.cache import Cache
from skiff_operator.kinds import INFERENCE_SERVICE, SERVICE
from skiff_operator.observe import Observer
from skiff_operator.settings import Settings
from skiff_runtime import contract

KEY = ("default", "llama")
OWNER = {
    "apiVersion": "serving.skiff.dev/v1alpha1",
    "kind": "InferenceService",
    "name": "llama",
    "uid": "earlier",
    "controller": True,
}
OTHER_OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "other"}


def child(**meta: Any) -> dict[str, Any]:
    """Return the Service of an earlier InferenceService as the API server has it."""
    obj: dict[str, Any] = plan.objects(service(), Settings())[(SERVICE, "llama")]
    fields = {"uid": "child", "resourceVersion": "10", "ownerReferences": [OWNER], **meta}
    return {**obj, "metadata": {**obj["metadata"], **fields}}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, "earlier"),
        ({"ownerReferences": []}, ""),
        ({"ownerReferences": None}, ""),
        ({"ownerReferences": [OWNER, OTHER_OWNER]}, ""),
        ({"ownerReferences": [OWNER | {"controller": False}]}, ""),
        ({"ownerReferences": [OWNER | {"name": "other"}]}, ""),
        ({"ownerReferences": [OWNER | {"kind": "ModelCache"}]}, ""),
        ({"ownerReferences": [OWNER | {"apiVersion": "serving.kserve.io/v1beta1"}]}, ""),
        ({"ownerReferences": [OWNER | {"apiVersion": "serving.skiff.dev/v2"}]}, "earlier"),
        ({"finalizers": ["orphan"]}, ""),
        ({"finalizers": ["kubernetes.io/pvc-protection"]}, "earlier"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, ""),
    ],
)
def test_only_what_belongs_to_nothing_else_has_a_sole_owner(meta: dict[str, Any], expected: str) -> None:
    assert ownership.sole_owner_uid(child(**meta), service="llama") == expected


@pytest.mark.parametrize("exists", [True, False], ids=["recreated", "deleted"])
def test_the_garbage_collector_has_a_whole_resync_for_its_work(exists: bool) -> None:
    observer = Observer(Cache(), Settings())
    if exists:
        observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    observer.observe(SERVICE, child(), "LISTED")
    assert observer.observe_resync() == []
    assert observer.observe_resync() == [KEY]
    assert observer.overdue == {"child"}
    observer.observe(SERVICE, child(), "DELETED")
    assert observer.observe_resync() == [] and not observer.overdue


def test_the_children_of_an_existing_service_are_no_leftovers() -> None:
    observer = Observer(Cache(), Settings())
    observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    own = child(ownerReferences=[OWNER | {"uid": raw()["metadata"]["uid"]}])
    observer.observe(SERVICE, own, "ADDED")
    assert [observer.observe_resync() for _ in range(3)] == [[], [], []]


@pytest.fixture
def without_collector(server: ApiServer, plane: ControlPlane) -> Iterator[None]:
    """Stop the controller manager, whose garbage collector thereby overlooks every deletion."""
    plane.daemons["kube-controller-manager"].stop()
    yield
    plane.restart("kube-controller-manager")


@pytest.mark.usefixtures("without_collector")
def test_leftovers_are_deleted_and_nothing_else_is(
    api: ApiServer, start: Callable[..., OperatorProcess]
) -> None:
    """One service is deleted, one is created again, and one finds an object in its way that has another owner, too."""
    operator = start("a", "--resync-seconds", "1")
    operator.start()
    create(api, "gone", "again")
    api.merge("inferenceservices", "again", {"spec": {"replicas": 2}})
    eventually(lambda: api.find("poddisruptionbudgets", "again"), "a budget")
    owners = {"shared": [OWNER | {"name": "shared"}, OTHER_OWNER], "orphaned": []}
    for name, references in owners.items():
        labels = {contract.LABEL_SERVICE: name}
        meta = {"name": name, "labels": labels, "ownerReferences": references}
        api.create("services", {"metadata": meta, "spec": {"ports": [{"port": 80}]}})
    kept = [api.get("services", name) for name in owners]
    before = {api.get(plural, "again")["metadata"]["uid"] for plural in CHILDREN}
    for name in ("gone", "again"):
        api.delete("inferenceservices", name)
    create(api, "again")
    api.create("inferenceservices", inference_service("shared"))

    eventually(lambda: not any(api.find(plural, "gone") for plural in CHILDREN), "nothing is left of `gone`")
    eventually(lambda: api.find("poddisruptionbudgets", "again") is None, "nor of the first `again`")
    after = {api.get(plural, "again")["metadata"]["uid"] for plural in CHILDREN}
    assert not before & after, "children are made anew, never taken over"
    eventually(lambda: "Service shared" in conflicts(api, "shared"), "NameConflict")
    resynced(operator, 3)
    assert [api.get("services", name) for name in owners] == kept
