"""Workload state, read from the status of a Deployment and of its pods. Pure.

Objects are reduced to small frozen records when they are observed; no whole object is kept.
"""

from typing import Any, Final

import msgspec

from skiff_operator import failure
from skiff_operator.kinds import CLAIM, SERVICE_ACCOUNT, Kind
from skiff_operator.redact import redact, redact_tail
from skiff_operator.resources.containers import FETCH
from skiff_operator.resources.metadata import (
    ANNOTATION_CANARY,
    ANNOTATION_MODEL_CACHE,
    ANNOTATION_SPEC_HASH,
    LABEL_REVISION,
)
from skiff_operator.rollout_strategy import ANNOTATION_REPLACE_REASON
from skiff_operator.startup import PodStartup

LOG_TAIL_CHARACTERS: Final = 2048
_PULL_REASONS: Final = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
_CONFIG_REASONS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class Rollout(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The progress of a Deployment, as far as its pods do not show it.

    `desired` is its number of replicas; `revision` is the label of its template, `spec_hash` the hash of the spec behind
    it, `replace_reason` the recorded reason to replace pods in place, `held` whether its new pods are a canary, and
    `model_cache` the ModelCache whose shared claim its pods mount. The other fields stay empty until its controller has
    observed the current generation: `replacing`, pods of an older template exist; `complete`, all desired pods are ready and
    there are no others; `stalled` and `blocked`, messages of its conditions.
    """

    desired: int
    revision: str = ""
    spec_hash: str = ""
    replace_reason: str = ""
    held: bool = False
    model_cache: str = ""
    replacing: bool = False
    stalled: str = ""
    blocked: str = ""
    complete: bool = False


class Crash(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The termination of a container: its cause and remedy, exit code, the redacted end of its output, and time (RFC 3339)."""

    reason: str
    exit_code: int
    log_tail: str
    at: str
    remedy: str = ""


class PodState(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. `trouble`: why it does not serve now; `crash`: its last one, kept after recovery. Times are RFC 3339 or "".

    `ended`: when the whole pod terminated. `used`: the ServiceAccount and claims that it uses; `model_cache`: the
    ModelCache whose shared claim is one of these. `restarts`: restarts of its containers since its creation.
    `ends_by`: end of the grace period; of a `terminating` pod only this and `used` are read.
    `unschedulable_since`: when the scheduler first found no node. `placed_at`: when it got a node, until its first
    container is created. `ip`: address of a ready pod. `startup`: set when the observer sees it become ready for the
    first time; `begun`: the observer saw it before its server had started.
    """

    name: str
    uid: str
    revision: str
    ready: bool
    phase: str
    trouble: str = ""
    message: str = ""
    crash: Crash | None = None
    ended: str = ""
    used: frozenset[tuple[Kind, str]] = frozenset()
    model_cache: str = ""
    terminating: bool = False
    ends_by: str = ""
    unschedulable_since: str = ""
    placed_at: str = ""
    ip: str = ""
    restarts: int = 0
    startup: PodStartup | None = None
    begun: bool = False


def used_by(pod_spec: dict[str, Any]) -> frozenset[tuple[Kind, str]]:
    """Return the ServiceAccount and the claims that a pod of this spec uses."""
    claims = [volume.get("persistentVolumeClaim") for volume in pod_spec.get("volumes") or []]
    names = [claim.get("claimName") for claim in claims if isinstance(claim, dict)]
    account = (SERVICE_ACCOUNT, str(pod_spec.get("serviceAccountName", "")))
    return frozenset([account, *((CLAIM, str(name)) for name in names)])


def read_rollout(deployment: dict[str, Any]) -> Rollout:
    """Read the status of a Deployment; a status of an older generation is ignored."""
    status = deployment.get("status") or {}
    desired = deployment["spec"].get("replicas", 1)
    template_metadata = deployment["spec"].get("template", {}).get("metadata", {})
    labels = template_metadata.get("labels") or {}
    annotations = deployment["metadata"].get("annotations") or {}
    template: dict[str, Any] = {
        "revision": labels.get(LABEL_REVISION, ""),
        "spec_hash": annotations.get(ANNOTATION_SPEC_HASH, ""),
        "replace_reason": annotations.get(ANNOTATION_REPLACE_REASON, ""),
        "held": ANNOTATION_CANARY in annotations,
        "model_cache": (template_metadata.get("annotations") or {}).get(ANNOTATION_MODEL_CACHE, ""),
    }
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return Rollout(desired=desired, **template)
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    progressing = conditions.get("Progressing", {})
    failure = conditions.get("ReplicaFailure", {})
    stalled = progressing.get("reason") == "ProgressDeadlineExceeded"
    counts = {status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas")}
    return Rollout(
        desired=desired,
        **template,
        complete=counts == {desired},
        replacing=status.get("updatedReplicas", 0) != status.get("replicas", 0),
        stalled=progressing.get("message", "") if stalled else "",
        blocked=failure.get("message", "") if failure.get("status") == "True" else "",
    )


def runs_in(pod: dict[str, Any], deployment: str) -> bool:
    """Return whether a pod belongs to the Deployment of that name in its namespace, whatever its labels are.

    The controller of such a pod is a ReplicaSet, named after the Deployment and the hash of its template.
    """
    meta = pod["metadata"]
    replica_set = f"{deployment}-{(meta.get('labels') or {}).get('pod-template-hash')}"
    return any(
        owner.get("controller") and (owner["kind"], owner["name"]) == ("ReplicaSet", replica_set)
        for owner in meta.get("ownerReferences") or []
    )


def read_pod(pod: dict[str, Any], *, gpu_resource: str) -> PodState:
    """Read the state of a pod; for one that is being deleted, only its identity and what it uses.

    A pod that is unschedulable for lack of `gpu_resource` gets a reason of its own.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    revision = (meta.get("labels") or {}).get(LABEL_REVISION, "")
    ended = status.get("phase") in ("Succeeded", "Failed")
    used = frozenset() if ended else used_by(pod.get("spec") or {})
    model_cache = "" if ended else (meta.get("annotations") or {}).get(ANNOTATION_MODEL_CACHE, "")
    if "deletionTimestamp" in meta:
        return PodState(
            name=meta["name"],
            uid=meta["uid"],
            revision=revision,
            ready=False,
            phase="Terminating",
            used=used,
            model_cache=model_cache,
            terminating=True,
            ends_by=meta["deletionTimestamp"],
        )
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    ready = conditions.get("Ready", {}).get("status") == "True"
    trouble, message = ("", "") if ready else _trouble(status, conditions, gpu_resource)
    return PodState(
        name=meta["name"],
        uid=meta["uid"],
        revision=revision,
        ready=ready,
        phase=_phase(status, ready=ready),
        trouble=trouble,
        message=redact(message),
        crash=_last_crash(status),
        ended=_ended(pod),
        used=used,
        model_cache=model_cache,
        unschedulable_since=_unschedulable_since(conditions),
        placed_at=_placed_at(status, conditions),
        ip=status.get("podIP", "") if ready else "",
        restarts=sum(container.get("restartCount", 0) for container in _containers(status)),
    )


def _placed_at(status: dict[str, Any], conditions: dict[str, Any]) -> str:
    """Return the time at which a pod got its node, while no container of it has been created."""
    scheduled = conditions.get("PodScheduled", {})
    waiting = [container.get("state", {}).get("waiting", {}) for container in _containers(status)]
    pending = all(each.get("reason") in ("ContainerCreating", "PodInitializing") for each in waiting)
    if status.get("phase") != "Pending" or scheduled.get("status") != "True" or not pending:
        return ""
    return scheduled.get("lastTransitionTime") or ""


def _unschedulable_since(conditions: dict[str, Any]) -> str:
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = (scheduled.get("status"), scheduled.get("reason")) == ("False", "Unschedulable")
    return scheduled.get("lastTransitionTime") or "" if unschedulable else ""


def _ended(pod: dict[str, Any]) -> str:
    """Return the time at which the whole pod failed or succeeded, as far as its status shows it; empty for a live one."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Failed", "Succeeded"):
        return ""
    stops = [container.get("state", {}).get("terminated") or {} for container in _containers(status)]
    times: list[str] = [pod["metadata"]["creationTimestamp"]]
    times += [stop.get("finishedAt") or "" for stop in stops]
    times += [each.get("lastTransitionTime") or "" for each in status.get("conditions") or []]
    return max(times)


def _containers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _phase(status: dict[str, Any], *, ready: bool) -> str:
    """Return the startup phase of a pod: Scheduling, Fetching, Creating, Loading or Serving."""
    if ready:
        return "Serving"
    for container in status.get("initContainerStatuses") or []:
        if container["name"] == FETCH and "running" in container.get("state", {}):
            return "Fetching"
    if any("running" in c.get("state", {}) for c in status.get("containerStatuses") or []):
        return "Loading"
    return "Creating" if _containers(status) else "Scheduling"


def _trouble(status: dict[str, Any], conditions: dict[str, Any], gpu_resource: str) -> tuple[str, str]:
    """Return reason and message of the first obstacle to readiness; empty while the pod merely starts."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "")
        return ("InsufficientGPU" if gpu_resource in message else "Unschedulable"), message
    if status.get("phase") == "Failed" and status.get("reason"):
        return status["reason"], status.get("message", "")
    for container in _containers(status):
        found = _container_trouble(container)
        if found is not None:
            return found
    return "", ""


def _container_trouble(container: dict[str, Any]) -> tuple[str, str] | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason, name = waiting.get("reason", ""), container["name"]
    if reason in _PULL_REASONS:
        return "ImagePullFailed", f"image {container['image']}: {waiting.get('message') or reason}"
    if reason in _CONFIG_REASONS:
        return "ContainerConfigError", f"container {name}: {waiting.get('message') or reason}"
    if name != FETCH and "running" in state and container.get("started"):
        return None  # it has started again since its last termination
    ended = _terminated(container)
    if ended is None or ended["exitCode"] == 0:
        return None
    times, found = container.get("restartCount", 0), _diagnose(name, ended)
    ending = f"container {name} ended with exit code {ended['exitCode']}, restarted {times} times"
    return _crash_reason(name, ended), f"{ending}: {found.reason}. {found.remedy}"


def _terminated(container: dict[str, Any]) -> dict[str, Any] | None:
    """Return the current or previous termination of a container."""
    for state in ("state", "lastState"):
        ended: dict[str, Any] | None = container.get(state, {}).get("terminated")
        if ended is not None:
            return ended
    return None


def _crash_reason(container_name: str, ended: dict[str, Any]) -> str:
    if ended.get("reason") == "OOMKilled":
        return "OutOfMemory"
    return "WeightsDownloadFailed" if container_name == FETCH else "CrashLoop"


def _diagnose(container_name: str, ended: dict[str, Any]) -> failure.Diagnosis:
    return failure.diagnose(
        container_name,
        exit_code=ended["exitCode"],
        reason=ended.get("reason", ""),
        log_tail=_log_tail(ended),
    )


def _log_tail(ended: dict[str, Any]) -> str:
    return redact_tail(ended.get("message", ""), limit=LOG_TAIL_CHARACTERS)


def _last_crash(status: dict[str, Any]) -> Crash | None:
    stops = [
        (each["name"], ended) for each in _containers(status) if (ended := _terminated(each)) is not None
    ]
    failed = [(name, ended) for name, ended in stops if ended["exitCode"] != 0]
    if not failed:
        return None
    name, ended = max(failed, key=lambda stop: stop[1].get("finishedAt") or "")
    found = _diagnose(name, ended)
    return Crash(
        reason=found.reason,
        exit_code=ended["exitCode"],
        log_tail=_log_tail(ended),
        at=ended.get("finishedAt") or "",
        remedy=found.remedy,
    )
