"""The operator's rights: the API server's audit log of one life of InferenceServices compared with the roles.

Nothing was refused, so no right is missing; and each right was used, so none is superfluous.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from apiserver import ApiServer
from controlplane import ControlPlane
from helm import ROOT
from operator_process import eventually
from play_kubelet import PlayKubelet
from strangers import condition, inference_service

CHILDREN = {
    "serviceaccounts": "llama",
    "persistentvolumeclaims": "llama-cache",
    "networkpolicies": "llama",
    "deployments": "llama",
    "services": "llama",
    "poddisruptionbudgets": "llama",
}
MANAGER = "app.kubernetes.io/managed-by"
ACCOUNT = "system:serviceaccount:skiff-system:skiff-operator"


class Right(NamedTuple):
    """One verb on one resource; a subresource is `resource/subresource`."""

    group: str
    resource: str
    verb: str


UNUSED = {
    Right("serving.skiff.dev", "inferenceservices/finalizers", "update"): (
        "the admission plugin OwnerReferencesPermissionEnforcement, which is off here, demands it of a creator of "
        "children that block their owner's deletion"
    ),
    Right("", "events", "list"): "when a pod has been stuck for 30 s; test_rollout_strategy.py needs it",
    Right("serving.skiff.dev", "inferenceservices/scale", "patch"): (
        "when autoscaling changes the number of pods; test_autoscaler.py needs it"
    ),
    Right("serving.skiff.dev", "loraadapters/status", "patch"): "only LoRAAdapters need it; test_lora.py",
    **{
        Right("", resource, verb): "only InferenceServices with LoRA adapters need it; test_lora.py"
        for resource, verbs in {
            "configmaps": ("get", "create", "update"),
            "pods": ("get", "create"),
            "secrets": ("get", "create"),
        }.items()
        for verb in verbs
    },
    Right("", "pods", "patch"): "before a scale-in of ready pods; test_scale_in.py needs it",
}
"""Rights without a request in the life below, and why they are needed."""


def granted() -> Iterator[Right]:
    """Yield the rights of the roles in manifests/operator; test_manifests.py compares these with the chart's."""
    for body in yaml.safe_load_all((ROOT / "manifests/operator/rbac.yaml").read_text()):
        for rule in body.get("rules", []):
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    yield from (Right(group, resource, verb) for verb in rule["verbs"])


def requests(plane: ControlPlane) -> list[tuple[Right, bool]]:
    """Return the operator's requests so far, each with the decision of RBAC: quotas and webhooks answer 403, too."""
    events = [json.loads(line) for line in plane.audit_log.read_text().splitlines() if line.endswith("}")]
    return [
        (right_of(event), event["annotations"]["authorization.k8s.io/decision"] == "allow")
        for event in events
        if event["user"]["username"] == ACCOUNT and "objectRef" in event
    ]


def right_of(event: dict[str, Any]) -> Right:
    """Return the right that a request needs."""
    named = event["objectRef"]
    resource = "/".join(part for part in (named["resource"], named.get("subresource", "")) if part)
    return Right(named.get("apiGroup", ""), resource, event["verb"])


@pytest.mark.usefixtures("operator")
def test_no_right_is_missing_and_none_is_superfluous(api: ApiServer, plane: ControlPlane) -> None:
    live(api)

    def unused() -> set[Right]:
        return set(granted()) - {right for right, allowed in requests(plane) if allowed}

    with contextlib.suppress(AssertionError):  # the next line shows the difference
        eventually(lambda: unused() <= UNUSED.keys(), "every right is used", 30, every_seconds=0.5)
    # Other tests of this process may have used the rights that are not needed here: the log is the API server's.
    assert unused() <= UNUSED.keys() <= set(granted())
    refused = Counter(right for right, allowed in requests(plane) if not allowed)
    assert not refused, refused


def live(api: ApiServer) -> None:
    """Let an InferenceService live that needs a child of every kind: made, edited, repaired, pruned."""
    api.create("inferenceservices", inference_service("llama"))
    # It requests GPUs, and its pod has no node: so the operator looks at the nodes.
    api.create("inferenceservices", inference_service("large", model={"uri": "demo://"}))
    PlayKubelet(api, "llama").serve(2)
    eventually(lambda: condition(api, "llama", "Ready")[0] == "True", "Ready")
    for plural, name in CHILDREN.items():
        api.merge(plural, name, {"metadata": {"labels": {MANAGER: "someone"}}})
        eventually(lambda plural=plural, name=name: is_labelled(api, plural, name), f"{plural}: repaired")  # type: ignore[misc]
    # Children under names that are not needed, as another version of the operator may have left them.
    for plural in ("serviceaccounts", "deployments", "services"):
        leave_copy(api, plural, f"{CHILDREN[plural]}-old")
        eventually(lambda plural=plural: api.find(plural, "llama-old") is None, f"{plural}: pruned")  # type: ignore[misc]
    # Another revision, and the first one again.
    for arguments in (["--page-size=32"], None):
        before = update_revision(api)
        api.merge("inferenceservices", "llama", {"spec": {"runtime": {"args": arguments}}})
        eventually(lambda before=before: update_revision(api) != before, "another revision")  # type: ignore[misc]
    # Deleted are the claim, the policy, the budget and the other revision.
    smaller = {
        "replicas": 0,
        "cache": None,
        "networkPolicy": None,
        "rollout": {"revisionHistoryLimit": 0},
    }
    api.merge("inferenceservices", "llama", {"spec": smaller})


def update_revision(api: ApiServer) -> str:
    """Return the revision of the spec, by the status."""
    return str(api.get("inferenceservices", "llama")["status"]["updateRevision"])


def is_labelled(api: ApiServer, plural: str, name: str) -> bool:
    """Return whether a child's label is the operator's."""
    return bool(api.get(plural, name)["metadata"]["labels"][MANAGER] == "skiff-operator")


def leave_copy(api: ApiServer, plural: str, name: str) -> None:
    """Create a copy of a child, which belongs to the same InferenceService."""
    child = api.get(plural, CHILDREN[plural])
    meta = {key: child["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
    spec = {
        key: child["spec"][key] for key in ("selector", "template", "ports") if key in child.get("spec", {})
    }
    api.create(plural, {"metadata": {**meta, "name": name}, **({"spec": spec} if spec else {})})
