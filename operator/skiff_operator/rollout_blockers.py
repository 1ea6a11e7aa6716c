"""The way out of a blocked rollout, by the reason and the message of what blocks it. Pure."""

from typing import Final

_REVERT: Final = "or revert the change"
_REPLACE: Final = "free or add resources, let spec.rollout.strategy: Replace take an old pod away first, or revert the change"

_BY_TEXT: Final = (
    ("exceeded quota", f"raise the quota, {_REPLACE.removeprefix('free or add resources, ')}"),
    ("violates PodSecurity", f"change podTemplate, {_REVERT}"),
    ("volume node affinity conflict", f"the claim's volume is on another node: make room there, {_REVERT}"),
    (
        "didn't match PersistentVolume's node affinity",
        f"make room on the node of the claim's volume, {_REVERT}",
    ),
    ("didn't match pod affinity rules", f"make room on the node where the claim is in use, {_REVERT}"),
    ("unbound immediate PersistentVolumeClaims", "create the claim or its volume; see its events"),
    ("persistentvolumeclaim", f"create the claim, {_REVERT}"),
    ("untolerated taint", f"add tolerations or nodes, {_REVERT}"),
    ("didn't match Pod's node affinity/selector", f"change nodeSelector, label a node, {_REVERT}"),
)
"""Texts of the scheduler and of the API server, the more specific ones first."""

_BY_REASON: Final = {
    "InsufficientGPU": _REPLACE,
    "Unschedulable": _REPLACE,
    "NoNodeLargeEnough": f"add such a node, lower parallelism.tensor, {_REVERT}",
    "PodCreateFailed": f"mend what the message names, {_REVERT}",
    "PodStuckTerminating": "check its node; if the node is gone, remove it with kubectl delete node",
    "VolumeNotMounted": f"a claim that one node at a time may use must be free: make room on its node, {_REVERT}",
    "SandboxNotCreated": f"see the node's network plugin and kubelet, {_REVERT}",
    "ImagePullFailed": f"correct runtime.image or the pull secrets, {_REVERT}",
    "ContainerConfigError": f"create what is missing, {_REVERT}",
    "WeightsDownloadFailed": f"see lastFailure.logTail, {_REVERT}",
    "OutOfMemory": f"raise resources.limits.memory, {_REVERT}",
    "CrashLoop": f"see lastFailure.logTail, {_REVERT}",
    "ProgressDeadlineExceeded": f"see the log of a new pod, raise startup.timeoutSeconds, {_REVERT}",
}


def way_out(reason: str, message: str) -> str:
    """Return what a user can do about an obstacle; the commonest advice for one that is not known here."""
    if reason in ("InsufficientGPU", "Unschedulable", "PodCreateFailed"):
        for text, advice in _BY_TEXT:
            if text in message:
                return advice
    return _BY_REASON.get(reason, f"see kubectl describe, {_REVERT}")
