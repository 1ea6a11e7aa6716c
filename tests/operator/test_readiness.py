"""Conditions over the life of a service, on a real API server: scaling, lost pods, and pods of others.

Statuses are compared in the order in which the operator wrote them, so that a condition that flaps is seen.
"""

import itertools
from typing import Any

import pytest
from apiserver import ApiServer
from operator_process import OperatorProcess, eventually
from play_kubelet import REVISION, PlayKubelet

pytestmark = pytest.mark.usefixtures("operator")
LABEL = "serving.skiff.dev/inferenceservice"


def create(api: ApiServer, replicas: int) -> str:
    """Create the demo service `llama`; its resource version."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "replicas": replicas}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    made = api.create("inferenceservices", {**body, "metadata": {"name": "llama"}})
    version: str = made["metadata"]["resourceVersion"]
    return version


def status(api: ApiServer) -> dict[str, Any]:
    """The status for the present generation; empty while there is none."""
    found = api.get("inferenceservices", "llama")
    written: dict[str, Any] = found.get("status", {})
    return written if written.get("observedGeneration") == found["metadata"]["generation"] else {}


def verdicts(written: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    return {each["type"]: (each["status"], each["reason"]) for each in written.get("conditions", [])}


def wait_for(api: ApiServer, **wanted: tuple[str, str]) -> dict[str, Any]:
    """Wait until these conditions hold together; the status in which they do."""
    seen: list[dict[str, Any]] = []

    def holds() -> bool:
        seen.append(status(api))
        return wanted.items() <= verdicts(seen[-1]).items()

    eventually(holds, f"{wanted}")
    return seen[-1]


def scale(api: ApiServer, replicas: int) -> None:
    """Set the number of replicas as `kubectl scale` does."""
    api.merge("inferenceservices", "llama", {"spec": {"replicas": replicas}}, "scale")


def statuses(api: ApiServer, since: str) -> list[dict[str, Any]]:
    """Every status that was written after a resource version, in order."""
    return [event["object"]["status"] for event in api.watched("inferenceservices", since)]


def history(api: ApiServer, since: str, kind: str) -> list[tuple[str, str]]:
    """Every verdict of one condition after a resource version, without repetitions."""
    found = [verdicts(written)[kind] for written in statuses(api, since)]
    return [verdict for verdict, _ in itertools.groupby(found)]


def version(api: ApiServer) -> str:
    """The present resource version of the service."""
    found: str = api.get("inferenceservices", "llama")["metadata"]["resourceVersion"]
    return found


SERVING, COMPLETE = ("True", "Serving"), ("False", "RolloutComplete")


def serving(api: ApiServer, replicas: int) -> PlayKubelet:
    """A service all of whose pods answer, and its kubelet."""
    create(api, replicas)
    kubelet = PlayKubelet(api, "llama")
    kubelet.serve(replicas)
    wait_for(api, Ready=SERVING, Progressing=COMPLETE)
    return kubelet


def test_a_scale_up_keeps_it_ready_and_is_no_rollout(api: ApiServer) -> None:
    kubelet = serving(api, 1)
    since = version(api)
    scale(api, 3)
    eventually(lambda: len(kubelet.pods()) == 3, "two pods more")
    written = wait_for(api, Ready=SERVING, Progressing=("True", "PodsStarting"))
    assert written["readyReplicas"] == 1
    kubelet.serve(3)
    written = wait_for(api, Ready=SERVING, Progressing=COMPLETE)
    assert (written["replicas"], written["readyReplicas"], written["updatedReplicas"]) == (3, 3, 3)
    assert history(api, since, "Ready") == [SERVING]
    assert history(api, since, "Progressing") == [COMPLETE, ("True", "PodsStarting"), COMPLETE]


def test_a_lost_pod_of_many_keeps_it_ready(api: ApiServer) -> None:
    kubelet = serving(api, 3)
    since = version(api)
    lost = kubelet.pods()[0]["metadata"]["name"]
    api.request("DELETE", api.path("pods", lost), {"gracePeriodSeconds": 0})
    eventually(lambda: lost not in [pod["metadata"]["name"] for pod in kubelet.pods()], "it is gone")
    eventually(lambda: status(api).get("readyReplicas") == 2, "two answer")
    eventually(lambda: len(kubelet.pods()) == 3, "another takes its place")
    kubelet.serve(3)
    eventually(lambda: status(api).get("readyReplicas") == 3, "three answer")
    assert history(api, since, "Ready") == [SERVING]
    assert history(api, since, "Degraded") == [("False", "AsExpected")]


def test_a_crashed_pod_among_serving_ones_degrades_and_keeps_it_ready(api: ApiServer) -> None:
    kubelet = serving(api, 2)
    since = version(api)
    crashed = kubelet.pods()[0]
    kubelet.crash(crashed, code=3, log="a rank hung")
    written = wait_for(api, Ready=SERVING, Degraded=("True", "CrashLoop"))
    assert written["lastFailure"]["pod"] == crashed["metadata"]["name"]
    kubelet.serve(2)
    wait_for(api, Ready=SERVING, Degraded=("False", "AsExpected"))
    assert history(api, since, "Ready") == [SERVING]


def test_a_failed_pod_that_was_replaced_is_history(api: ApiServer) -> None:
    """An evicted pod stays in the API, as Failed, long after another took its place."""
    kubelet = serving(api, 1)
    evicted = kubelet.pods()[0]
    kubelet.evict(evicted, code=137, log="disk full")
    written = wait_for(api, Ready=("False", "Evicted"), Degraded=("True", "Evicted"))
    assert written["lastFailure"]["pod"] == evicted["metadata"]["name"]
    kubelet.serve(1)
    written = wait_for(api, Ready=SERVING, Degraded=("False", "AsExpected"))
    assert "lastFailure" not in written
    assert api.find("pods", evicted["metadata"]["name"]) is not None
    assert (written["replicas"], written["readyReplicas"]) == (1, 1)


def test_scale_to_zero_neither_alarms_nor_flaps(api: ApiServer, operator: OperatorProcess) -> None:
    kubelet = serving(api, 2)
    since = version(api)
    scale(api, 0)
    eventually(lambda: not kubelet.pods(), "the pods are being deleted")
    zero = ("True", "ScaledToZero")
    wait_for(api, Ready=zero, Available=("False", "ScaledToZero"), Degraded=("False", "AsExpected"))
    kubelet.remove_deleted()
    wait_for(api, Ready=zero, Progressing=COMPLETE)
    assert history(api, since, "Ready") == [SERVING, zero]
    assert history(api, since, "Degraded") == [("False", "AsExpected")]
    gauge = f"skiff_operator_inferenceservice_ready{{service=llama,service_namespace={api.namespace}}}"
    assert operator.metrics()[gauge] == 1, "the alert for services that are not Ready stays silent"
    since = version(api)
    scale(api, 2)
    wait_for(api, Ready=("False", "PodsStarting"), Progressing=("True", "PodsStarting"))
    kubelet.serve(1)
    wait_for(api, Ready=SERVING)
    rolls = [verdict for verdict in history(api, since, "Progressing") if "Rollout" in verdict[1]]
    assert rolls in ([COMPLETE], [COMPLETE, COMPLETE]), "no rollout was announced"


def test_ready_waits_for_the_last_old_pod(api: ApiServer) -> None:
    kubelet = serving(api, 2)
    since, old = version(api), kubelet.pods()[0]["metadata"]["labels"][REVISION]
    api.merge("inferenceservices", "llama", {"spec": {"runtime": {"maxModelLen": 1024}}})
    new = wait_for(api, Ready=("False", "RolloutInProgress"), Available=("True", "PodsReady"))[
        "updateRevision"
    ]
    assert status(api)["updatedReplicas"] <= 1, "old pods are not counted as updated"

    def rolled() -> bool:
        if kubelet.pods(new):
            kubelet.serve(1, new)
        kubelet.remove_deleted()
        return not kubelet.pods(old)

    eventually(rolled, "the old pods are being deleted")
    kubelet.serve(2, new)
    written = wait_for(api, Ready=SERVING, Progressing=COMPLETE)
    assert written["currentRevision"] == new
    assert [verdict[0] for verdict in history(api, since, "Ready")] == ["True", "False", "True"]


def stranger(name: str) -> dict[str, Any]:
    """Somebody else's Deployment whose objects carry our label."""
    labels = {"app": name, LABEL: "llama"}
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "main", "image": "example.com/other:1", "securityContext": security}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def test_what_others_label_as_ours_does_not_count(api: ApiServer) -> None:
    kubelet = serving(api, 1)
    since = version(api)
    api.create("deployments", stranger("stranger"))
    eventually(lambda: len(kubelet.pods()) == 3, "its pods")
    theirs = [pod for pod in kubelet.pods() if "app" in pod["metadata"]["labels"]]
    kubelet.crash(theirs[0], code=1, log="not ours")
    kubelet.report(theirs[1], ready=True, state={"running": {"startedAt": "2026-01-01T00:00:00Z"}})
    eventually(
        lambda: api.get("deployments", "stranger")["status"].get("readyReplicas") == 1, "one of them answers"
    )
    scale(api, 2)
    eventually(lambda: status(api).get("replicas") == 2, "our own second pod")
    api.delete("deployments", "stranger")
    eventually(lambda: api.find("deployments", "stranger") is None, "the stranger is gone")
    seen = statuses(api, since)
    assert {written["replicas"] for written in seen} == {1, 2}
    assert {written["readyReplicas"] for written in seen} == {1}
    assert {verdicts(written)["Ready"] for written in seen} == {SERVING}
    assert {verdicts(written)["Degraded"][0] for written in seen} == {"False"}
    scale(api, 0)
    wait_for(api, Ready=("True", "ScaledToZero"), Available=("False", "ScaledToZero"))
