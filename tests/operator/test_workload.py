"""Workload state: the trouble of a pod, read from its status as kubelets write it."""

from typing import Any

import pytest

from skiff_operator import workload

MADE = {"creationTimestamp": "2026-01-01T00:00:00Z"}


def pod(
    *containers: dict[str, Any], init: list[dict[str, Any]] | None = None, **status: Any
) -> dict[str, Any]:
    """A pod with these container statuses."""
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {"serving.skiff.dev/revision": "r"}, **MADE},
        "status": {"containerStatuses": list(containers), "initContainerStatuses": init or [], **status},
    }


def container(name: str = "runtime", **fields: Any) -> dict[str, Any]:
    """One container's status."""
    return {"name": name, "image": "img:1", "restartCount": 3, "state": {}, **fields}


def ended(
    code: int, reason: str = "Error", message: str = "", at: str = "2026-01-01T00:00:00Z"
) -> dict[str, Any]:
    """A terminated state."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """A waiting state."""
    return {"waiting": {"reason": reason, "message": message}}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
BACK_OFF = waiting("CrashLoopBackOff")

TROUBLES = [
    (pod(container(state=waiting("ErrImagePull", "no such image"))), "ImagePullFailed", "img:1: no such image"),
    (pod(container(state=waiting("ImagePullBackOff"))), "ImagePullFailed", "ImagePullBackOff"),
    (pod(container(state=waiting("CreateContainerConfigError", 'secret "hub" not found'))), "ContainerConfigError", "hub"),
    (pod(container(state=BACK_OFF, lastState=ended(1))), "CrashLoop", "exit code 1, restarted 3 times"),
    (pod(container(state={"running": {}}, lastState=ended(137, "OOMKilled"))), "OutOfMemory", "137"),
    (pod(init=[container("fetch", state=BACK_OFF, lastState=ended(5))]), "WeightsDownloadFailed", "fetch"),
    (pod(conditions=[UNSCHEDULABLE | {"message": "0/1 nodes: 1 Insufficient nvidia.com/gpu"}]), "InsufficientGPU", "0/1"),
    (pod(conditions=[UNSCHEDULABLE | {"message": "unbound claims"}]), "Unschedulable", "unbound claims"),
    (pod(phase="Failed", reason="Evicted", message="disk pressure"), "Evicted", "disk pressure"),
    (pod(container(state={"running": {}})), "", ""),
    (pod(container(state={"running": {}}, started=True, lastState=ended(1))), "", ""),
    (pod(init=[container("fetch", state={"running": {}}, started=True, lastState=ended(5))]), "WeightsDownloadFailed", ""),
    (pod(), "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("obj", "reason", "message"), TROUBLES)
def test_the_reason_why_a_pod_does_not_serve(obj: dict[str, Any], reason: str, message: str) -> None:
    state = workload.read_pod(obj, gpu_resource="nvidia.com/gpu")
    assert state is not None
    assert state.trouble == reason
    assert message in state.message


def test_a_ready_pod_has_no_trouble_but_remembers_its_crash() -> None:
    crashed = ended(1, message="boom\n" * 1000)
    state = workload.read_pod(
        pod(
            container(state={"running": {}}, lastState=crashed),
            conditions=[{"type": "Ready", "status": "True"}],
        ),
        gpu_resource="nvidia.com/gpu",
    )
    assert state is not None and state.ready and state.trouble == "" and state.phase == "Serving"
    assert state.crash is not None and state.crash.exit_code == 1
    assert state.crash.log_tail.endswith("boom\n")
    assert len(state.crash.log_tail) <= workload.LOG_TAIL_CHARACTERS


def test_a_pod_that_is_being_deleted_tells_nothing() -> None:
    obj = pod(container(state=BACK_OFF, lastState=ended(1)))
    obj["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    state = workload.read_pod(obj, gpu_resource="nvidia.com/gpu")
    assert state.terminating
    assert (state.ready, state.trouble, state.crash) == (False, "", None)


@pytest.mark.parametrize(
    ("obj", "phase"),
    [
        (pod(), "Scheduling"),
        (pod(container(), init=[container("fetch", state={"running": {}})]), "Fetching"),
        (pod(container(state=waiting("ContainerCreating"))), "Creating"),
        (pod(container(state={"running": {}})), "Loading"),
    ],
)
def test_phases_of_a_start(obj: dict[str, Any], phase: str) -> None:
    state = workload.read_pod(obj, gpu_resource="nvidia.com/gpu")
    assert state is not None and state.phase == phase


def deployment(generation: int, **status: Any) -> dict[str, Any]:
    """A Deployment of two replicas."""
    return {"metadata": {"generation": generation}, "spec": {"replicas": 2}, "status": status}


STUCK = [
    {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "slow"},
    {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota"},
]


def test_a_deployments_status() -> None:
    status = {"observedGeneration": 3, "replicas": 3, "updatedReplicas": 1, "conditions": STUCK}
    found = workload.read_rollout(deployment(3, **status))
    assert found == workload.Rollout(desired=2, replacing=True, stalled="slow", blocked="quota")
    whole = workload.read_rollout(deployment(3, observedGeneration=3, replicas=2, updatedReplicas=2))
    assert whole == workload.Rollout(desired=2)


def test_a_status_of_an_older_generation_says_nothing() -> None:
    status = {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1, "conditions": STUCK}
    assert workload.read_rollout(deployment(3, **status)) == workload.Rollout(desired=2)


def test_a_pod_that_ended_as_a_whole_says_when() -> None:
    crashed = container(state=ended(1, at="2026-01-01T00:00:05Z"))
    evicted = [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:07Z"}]
    for obj, at in (
        (pod(crashed, phase="Running"), ""),
        (pod(crashed, phase="Failed"), "2026-01-01T00:00:05Z"),
        (pod(crashed, phase="Failed", conditions=evicted), "2026-01-01T00:00:07Z"),
        (pod(phase="Succeeded"), MADE["creationTimestamp"]),
    ):
        state = workload.read_pod(obj, gpu_resource="nvidia.com/gpu")
        assert state is not None and state.ended == at
