"""Children that the garbage collector overlooked are deleted once their InferenceService is provably gone; no other is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from controlplane import ControlPlane
from installation import Installation
from operator_checks import CHILDREN, create, resynced
from operator_process import OperatorProcess, eventually
from services import raw, service
from strangers import conflicts, inference_service

from skiff_operator import ownership, plan
from skiff_operator.cache import Cache
from skiff_operator.kinds import INFERENCE_SERVICE, SERVICE, Stage
from skiff_operator.observe import Observer, ReconcileRequest
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


def demo(name: str) -> dict[str, Any]:
    """Return an InferenceService of the demo model."""
    return inference_service(name, model={"uri": "demo://"}, runtime={"device": "cpu"})


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
    freed = observer.observe(SERVICE, child(), "DELETED")
    assert freed == ReconcileRequest(KEY, Stage.CHILDREN)
    assert observer.observe_resync() == [] and not observer.overdue


def test_the_children_of_an_existing_service_are_no_leftovers() -> None:
    observer = Observer(Cache(), Settings())
    observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    own = child(ownerReferences=[OWNER | {"uid": raw()["metadata"]["uid"]}])
    observer.observe(SERVICE, own, "ADDED")
    assert [observer.observe_resync() for _ in range(3)] == [[], [], []]


@pytest.fixture
def operator(api: ApiServer, installation: Installation, tmp_path: Path) -> Iterator[OperatorProcess]:
    """Run an operator of the test's namespace that looks at everything each second."""
    flags = ("--namespaces", api.namespace, "--status-delay-seconds", "0.1", "--resync-seconds", "1")
    process = installation.operator(tmp_path, "leftovers", *flags)
    try:
        process.start()
        yield process
    finally:
        process.end()


def test_leftovers_are_deleted_and_nothing_else_is(
    api: ApiServer, plane: ControlPlane, operator: OperatorProcess
) -> None:
    """While no garbage collector runs, one service is deleted, one is made anew, and one finds a shared object."""
    create(api, "gone", "again")
    api.merge("inferenceservices", "again", {"spec": {"replicas": 2}})
    eventually(lambda: api.find("poddisruptionbudgets", "again"), "a budget")
    owners = {"shared": [OWNER | {"name": "shared"}, OTHER_OWNER], "orphaned": []}
    before = {api.get(plural, "again")["metadata"]["uid"] for plural in CHILDREN}
    manager = "kube-controller-manager"
    plane.daemons[manager].stop()
    try:
        for name, references in owners.items():
            meta = {"name": name, "labels": {contract.LABEL_SERVICE: name}, "ownerReferences": references}
            api.create("services", {"metadata": meta, "spec": {"ports": [{"port": 80}]}})
        kept = [api.get("services", name) for name in owners]
        for name in ("gone", "again"):
            api.delete("inferenceservices", name)
        for name in ("again", "shared"):
            api.create("inferenceservices", demo(name))
        for plural in ("serviceaccounts", "services"):
            eventually(lambda plural=plural: api.find(plural, "gone") is None, f"{plural}: deleted")  # type: ignore[misc]
        eventually(lambda: api.find("poddisruptionbudgets", "again") is None, "what is not needed is deleted")
        for name in ("gone", "again"):
            meta = eventually(lambda name=name: is_deleted(api, name), f"the Deployment {name} is deleted")  # type: ignore[misc]
            assert meta["finalizers"] == ["foregroundDeletion"], "it stays until its pods are gone"
        eventually(lambda: "Service shared" in conflicts(api, "shared"), "NameConflict")
        resynced(operator, 3)
        assert [api.get("services", name) for name in owners] == kept
    finally:
        plane.restart(manager)
    eventually(lambda: api.find("deployments", "gone") is None, "nothing is left")
    eventually(
        lambda: all(is_new(api, plural, before) for plural in CHILDREN), "the new one has its children"
    )


def is_deleted(api: ApiServer, name: str) -> Any:
    """Return the metadata of a Deployment whose deletion has begun."""
    meta = api.get("deployments", name)["metadata"]
    return meta if "deletionTimestamp" in meta else None


def is_new(api: ApiServer, plural: str, before: set[str]) -> bool:
    """Return whether there is a child of `again` that did not exist before."""
    found = api.find(plural, "again")
    return bool(found) and found["metadata"]["uid"] not in before
