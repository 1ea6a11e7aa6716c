"""The operator's daily work against a real API server: create, roll, scale, repair, prune, report, delete."""

from typing import Any

import pytest
from apiserver import ApiServer
from operator_checks import condition
from operator_process import OperatorProcess, eventually
from play_kubelet import PlayKubelet
from services import hub

CHILDREN = ("serviceaccounts", "deployments", "services")
pytestmark = pytest.mark.usefixtures("operator")


def create(api: ApiServer, name: str = "llama", **fields: Any) -> Any:
    """Create an InferenceService; by default the demo model on the CPU."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    return api.create("inferenceservices", {**body, "metadata": {"name": name}})


def edit(api: ApiServer, name: str = "llama", **fields: Any) -> None:
    """Merge into the spec."""
    api.merge("inferenceservices", name, {"spec": fields})


def wait_for(api: ApiServer, kind: str, *verdict: str, name: str = "llama") -> Any:
    """Wait for a condition; the status in which it holds."""
    eventually(lambda: condition(api, kind, name) == verdict, f"{name} {kind} {verdict}")
    return api.get("inferenceservices", name)["status"]


def wait_child(api: ApiServer, plural: str, name: str = "llama") -> Any:
    """Wait until a child exists."""
    return eventually(lambda: api.find(plural, name), f"{plural}/{name}")


def events(api: ApiServer) -> list[tuple[str, str]]:
    """Type and reason of the operator's Events in the namespace."""
    ours = [each for each in api.list("events") if each["reportingController"] == "skiff-operator"]
    return sorted((each["type"], each["reason"]) for each in ours)


def test_from_nothing_to_ready(api: ApiServer) -> None:
    made = create(api)
    for plural in CHILDREN:
        child = wait_child(api, plural)
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
        managers = {
            entry["manager"] for entry in child["metadata"]["managedFields"] if "subresource" not in entry
        }
        assert "skiff-operator" in managers
    status = wait_for(api, "Progressing", "True", "RolloutInProgress")
    assert status["url"] == f"http://llama.{api.namespace}.svc/v1"
    PlayKubelet(api, "llama").serve(1)
    status = wait_for(api, "Ready", "True", "Serving")
    assert (status["readyReplicas"], status["currentRevision"]) == (1, status["updateRevision"])
    after = api.get("inferenceservices", "llama")["metadata"]
    assert after["generation"] == made["metadata"]["generation"]
    assert "finalizers" not in after and "annotations" not in after
    eventually(lambda: events(api) == [("Normal", "Ready")], "one Event")


def test_an_edit_rolls_and_ready_waits_for_the_new_pods(api: ApiServer) -> None:
    create(api)
    kubelet = PlayKubelet(api, "llama")
    kubelet.serve(1)
    old = wait_for(api, "Ready", "True", "Serving")["updateRevision"]
    edit(api, runtime={"env": [{"name": "A", "value": "1"}]})
    status = wait_for(api, "Ready", "False", "RolloutInProgress")
    new = status["updateRevision"]
    assert new != old and status["currentRevision"] == old
    assert condition(api, "Available") == ("True", "PodsReady"), "the old pod serves meanwhile"
    kubelet.serve(1, new)
    eventually(lambda: not kubelet.pods(old), "the old pod is deleted")
    kubelet.remove_deleted()
    assert wait_for(api, "Ready", "True", "Serving")["currentRevision"] == new
    eventually(lambda: ("Normal", "RolloutStarted") in events(api), "an Event reports it")


def test_pods_of_every_shape_pass_the_restricted_level(api: ApiServer) -> None:
    create(api, "tensor", parallelism={"tensor": 2})
    create(api, "hub", model=hub(), cache={"size": "1Gi"})
    create(api, "claim", model={"uri": "pvc://models/llama"})
    for name in ("tensor", "hub", "claim"):
        assert eventually(PlayKubelet(api, name).pods, f"pods of {name}")
    assert wait_child(api, "persistentvolumeclaims", "hub-cache")["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_scaling_and_pruning(api: ApiServer) -> None:
    create(api)
    wait_child(api, "services")
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 2}}, "scale")
    wait_child(api, "poddisruptionbudgets")
    PlayKubelet(api, "llama").serve(2)
    assert wait_for(api, "Ready", "True", "Serving")["replicas"] == 2
    scale = api.get("inferenceservices", "llama", "scale")["status"]
    assert scale == {"replicas": 2, "selector": "serving.skiff.dev/inferenceservice=llama"}
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 1}}, "scale")
    eventually(lambda: api.find("poddisruptionbudgets", "llama") is None, "the budget is pruned")
    eventually(lambda: api.get("deployments", "llama")["spec"]["replicas"] == 1, "one replica")
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 0}}, "scale")
    wait_for(api, "Ready", "True", "ScaledToZero")


def test_drift_is_repaired(api: ApiServer) -> None:
    create(api)
    deployment = wait_child(api, "deployments")
    wait_for(api, "Progressing", "True", "RolloutInProgress")
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    other = {"containers": [{**deployment["spec"]["template"]["spec"]["containers"][0], "image": "other:1"}]}
    api.merge("deployments", "llama", {"spec": {"replicas": 5, "template": {"spec": other}}})
    api.merge("services", "llama", {"spec": {"selector": {"serving.skiff.dev/inferenceservice": "wrong"}}})
    api.delete("serviceaccounts", "llama")

    def repaired() -> bool:
        live = api.get("deployments", "llama")["spec"]
        chosen = api.get("services", "llama")["spec"]["selector"]["serving.skiff.dev/inferenceservice"]
        right = live["template"]["spec"]["containers"][0]["image"] == image and live["replicas"] == 1
        return right and chosen == "llama" and api.find("serviceaccounts", "llama") is not None

    eventually(repaired, "everything is as it was")


def test_additions_of_others_are_left_alone(api: ApiServer, operator: OperatorProcess) -> None:
    create(api)
    wait_for(api, "Progressing", "True", "RolloutInProgress")
    api.merge("serviceaccounts", "llama", {"imagePullSecrets": [{"name": "registry"}]})
    api.merge("deployments", "llama", {"metadata": {"annotations": {"team": "a"}}})
    edit(api, drain={"timeoutSeconds": 5})
    eventually(lambda: "5" in _arguments(api), "the edit is applied")
    assert api.get("serviceaccounts", "llama")["imagePullSecrets"] == [{"name": "registry"}]
    assert api.get("deployments", "llama")["metadata"]["annotations"]["team"] == "a"
    assert operator.healthy()


def _arguments(api: ApiServer) -> list[str]:
    arguments: list[str] = api.get("deployments", "llama")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    return arguments


def test_an_impossible_spec_is_told_and_harms_nobody(api: ApiServer) -> None:
    create(api)
    PlayKubelet(api, "llama").serve(1)
    wait_for(api, "Ready", "True", "Serving")
    before = api.get("deployments", "llama")["metadata"]["generation"]
    edit(api, runtime={"args": ["--port", "1"]})
    status = wait_for(api, "Degraded", "True", "InvalidSpec")
    messages = {each["type"]: each["message"] for each in status["conditions"]}
    assert messages["Ready"] == "spec.runtime.args: --port is set by the operator; remove it"
    assert condition(api, "Available") == ("True", "PodsReady")
    create(api, "other")
    wait_child(api, "deployments", "other")
    assert api.get("deployments", "llama")["metadata"]["generation"] == before
    edit(api, runtime={"args": None})
    wait_for(api, "Ready", "True", "Serving")


def test_host_paths_are_refused_with_advice(api: ApiServer) -> None:
    create(api, model={"uri": "file:///srv/llama"})
    status = wait_for(api, "Ready", "False", "InvalidSpec")
    assert "--allow-host-path" in status["conditions"][0]["message"]
    assert api.find("deployments", "llama") is None


def test_failures_are_read_from_the_pods(api: ApiServer) -> None:
    create(api, model=hub())
    kubelet = PlayKubelet(api, "llama")
    pod = (eventually(kubelet.pods, "a pod") or [])[0]
    kubelet.crash(pod, code=5, log="404: no such repository", init=True)
    status = wait_for(api, "Degraded", "True", "WeightsDownloadFailed")
    assert status["lastFailure"] == {
        "pod": pod["metadata"]["name"],
        "reason": "WeightsDownloadFailed",
        "exitCode": 5,
        "logTail": "404: no such repository",
        "at": "2026-01-01T00:00:00Z",
        "remedy": "Read logTail: the download's last line names what failed.",
    }
    kubelet.crash(pod, code=137, log="", reason="OOMKilled")
    wait_for(api, "Ready", "False", "OutOfMemory")
    kubelet.report(pod, state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, init=True)
    wait_for(api, "ModelReady", "False", "ImagePullFailed")
    expected = ["ImagePullFailed", "OutOfMemory", "WeightsDownloadFailed"]
    eventually(
        lambda: sorted(reason for kind, reason in events(api) if kind == "Warning") == expected, "the Events"
    )


def test_pods_that_cannot_be_made_are_told(api: ApiServer) -> None:
    quota = f"/api/v1/namespaces/{api.namespace}/resourcequotas"
    api.request("POST", quota, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    eventually(
        lambda: "hard" in api.request("GET", f"{quota}/none").get("status", {}), "the quota is in force"
    )
    create(api)
    status = wait_for(api, "Degraded", "True", "PodCreateFailed")
    assert "exceeded quota" in status["conditions"][0]["message"]


def test_what_the_api_server_refuses_is_told(api: ApiServer) -> None:
    create(api, podTemplate={"spec": {"containers": [{"name": "no-image"}]}})
    status = wait_for(api, "Ready", "False", "ApplyFailed")
    assert "image: Required value" in status["conditions"][0]["message"]
    edit(api, podTemplate=None)
    wait_for(api, "Degraded", "False", "AsExpected")


def test_deleting_removes_everything_and_making_it_again_works(api: ApiServer) -> None:
    for _ in range(2):
        create(api, replicas=2, model=hub(), cache={"size": "1Gi"})
        object_keys = [*((plural, "llama") for plural in (*CHILDREN, "poddisruptionbudgets"))]
        object_keys.append(("persistentvolumeclaims", "llama-cache"))
        for plural, name in object_keys:
            wait_child(api, plural, name)
        api.delete("inferenceservices", "llama")

        def gone(object_keys: list[tuple[str, str]] = object_keys) -> bool:
            PlayKubelet(api, "llama").remove_deleted()
            return not any(api.find(plural, name) for plural, name in object_keys)

        eventually(gone, "all children are gone")
