"""The operator writes to its own objects only: those that it made, or whose controller is the InferenceService."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from apiserver import ApiServer, Refused
from controlplane import ControlPlane
from operator_process import OperatorProcess, eventually
from strangers import FLAVOURS, Strangers, children, condition, conflicts, inference_service, play

pytestmark = pytest.mark.usefixtures("operator")
MANAGER = "skiff-operator"


def demo(name: str = "llama", **fields: Any) -> dict[str, Any]:
    """An InferenceService of the demo model on the CPU."""
    return inference_service(name, **{"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, **fields})


def test_strangers_objects_are_untouched_to_the_end(api: ApiServer) -> None:
    play(api)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_it_heals_when_the_strangers_go(api: ApiServer, flavour: str) -> None:
    strangers = Strangers(api)
    strangers.take("llama", flavour)
    made = api.create("inferenceservices", inference_service("llama"))
    said = eventually(lambda: conflicts(api, "llama"), "NameConflict")
    for kind in ("ServiceAccount llama ", "PersistentVolumeClaim llama-cache ", "Service llama "):
        assert kind in said, "every object in the way is named"
    strangers.give_back()

    def healed() -> bool:
        found = [api.find(*object_key) for object_key, _ in children("llama", api.namespace)]
        owners = [obj and obj["metadata"].get("ownerReferences", [{}])[0].get("uid") for obj in found]
        return set(owners) == {made["metadata"]["uid"]}

    eventually(healed, "all children are made")
    eventually(lambda: condition(api, "llama")[1] not in ("", "NameConflict"), "no conflict is left")


def test_no_pod_runs_as_a_strangers_account(api: ApiServer) -> None:
    """The children that do not need the account are made all the same."""
    api.create("serviceaccounts", {"metadata": {"name": "llama", "annotations": {"cloud/role": "admin"}}})
    api.create("inferenceservices", demo(replicas=2))
    eventually(lambda: conflicts(api, "llama"), "NameConflict")
    assert api.find("services", "llama") and api.find("poddisruptionbudgets", "llama")
    assert api.find("deployments", "llama") is None
    api.delete("serviceaccounts", "llama")
    eventually(lambda: api.find("deployments", "llama"), "the Deployment follows the account")


def test_an_object_that_lost_its_owner_is_let_go(api: ApiServer) -> None:
    """Someone who removes our reference, as an orphaning deletion does, takes the object over."""
    api.create("inferenceservices", demo())
    eventually(lambda: api.find("services", "llama"), "a Service")
    api.merge("services", "llama", {"metadata": {"ownerReferences": None}})
    eventually(lambda: "Service llama" in conflicts(api, "llama"), "NameConflict")
    before = api.get("services", "llama")
    api.merge("inferenceservices", "llama", {"spec": {"drain": {"timeoutSeconds": 9}}})
    eventually(lambda: conflicts(api, "llama"), "NameConflict")
    assert api.get("services", "llama") == before


def test_a_child_that_lost_its_label_gets_it_back(api: ApiServer) -> None:
    """The watch no longer shows it, but its owner says whose it is."""
    api.create("inferenceservices", demo())
    uid = eventually(lambda: api.find("services", "llama"), "a Service")["metadata"]["uid"]
    api.merge("services", "llama", {"metadata": {"labels": None}})
    eventually(lambda: api.get("services", "llama")["metadata"].get("labels"), "its labels are back")
    assert api.get("services", "llama")["metadata"]["uid"] == uid
    assert conflicts(api, "llama") == ""


def test_what_is_no_longer_asked_for_is_removed_from_what_was_created(api: ApiServer) -> None:
    """The fields of the creation belong to the operator as those of later changes do."""
    template = {"metadata": {"annotations": {"team": "a"}}, "spec": {"priority": 0, "hostname": "h"}}
    api.create("inferenceservices", demo(nodeSelector={"a": "b"}, podTemplate=template))
    eventually(lambda: api.find("deployments", "llama"), "a Deployment")
    api.merge("deployments", "llama", {"spec": {"template": {"metadata": {"annotations": {"other": "x"}}}}})
    api.merge("inferenceservices", "llama", {"spec": {"nodeSelector": None, "podTemplate": None}})

    def trimmed() -> bool:
        pod = api.get("deployments", "llama")["spec"]["template"]
        removed = not {"nodeSelector", "hostname"} & set(pod["spec"])
        return removed and pod["metadata"].get("annotations") == {"other": "x"}

    eventually(trimmed, "only what others added remains")
    fields = api.get("deployments", "llama")["metadata"]["managedFields"]
    ours = [(each["operation"], each.get("subresource")) for each in fields if each["manager"] == MANAGER]
    assert ours == [("Apply", None)]


@contextlib.contextmanager
def contended_quota(plane: ControlPlane, api: ApiServer) -> Iterator[None]:
    """A quota that others change all the time, so that the API server fails to charge some creations to it."""
    hard = {"count/services": "500", "count/serviceaccounts": "500", "count/deployments.apps": "500"}
    api.create("resourcequotas", {"metadata": {"name": "busy"}, "spec": {"hard": hard}})
    ended = threading.Event()

    def contend(number: int) -> None:
        mine, count = ApiServer(plane.kubeconfig, api.namespace), 0
        while not ended.is_set():
            count += 1
            with contextlib.suppress(Refused):
                mine.merge("resourcequotas", "busy", {"metadata": {"annotations": {str(number): str(count)}}})

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_conflict_over_a_quota_is_no_name_conflict(
    api: ApiServer, plane: ControlPlane, operator: OperatorProcess
) -> None:
    def conflicted() -> float:
        return sum(count for name, count in operator.metrics().items() if "code=409" in name)

    before, names = conflicted(), [f"s{number}" for number in range(20)]
    with contended_quota(plane, api):
        for name in names:
            api.create("inferenceservices", demo(name))
        eventually(lambda: conflicted() > before, "a creation conflicts over the quota")
    for name in names:
        eventually(lambda name=name: api.find("services", name), f"Service {name}")  # type: ignore[misc]
    warnings = [each for each in api.list("events") if each["reason"] == "NameConflict"]
    assert not warnings, json.dumps(warnings[:1])
