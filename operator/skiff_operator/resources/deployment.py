"""The Deployment that runs the replicas and rolls them one by one without losing a request."""

from typing import Any, Final

from skiff_operator import canary, rollout_strategy
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import pod
from skiff_operator.resources.metadata import (
    ANNOTATION_CANARY,
    ANNOTATION_HASH,
    ANNOTATION_SPEC_HASH,
    LABEL_REVISION,
    child,
    digest,
    selector,
)
from skiff_operator.rollout_strategy import ANNOTATION_REPLACE_REASON, Choice
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService, RolloutPolicy

_IMAGE_PULL_SECONDS: Final = 600


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Build the Deployment, with the strategy that the spec alone demands; `with_strategy` adds what was chosen."""
    paused = {"paused": True} if service.spec.rollout.paused else {}
    policy = service.spec.rollout
    return child(
        DEPLOYMENT,
        service,
        spec={
            **paused,
            "replicas": service.spec.replicas,
            "selector": {"matchLabels": selector(service)},
            "strategy": _strategy(policy, replace=policy.strategy == "Replace"),
            "minReadySeconds": 2,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": progress_deadline_seconds(service),
            "template": pod.build(service, settings),
        },
    )


def revision(deployment: dict[str, Any]) -> str:
    """Return the revision label of a built Deployment's pods."""
    value: str = deployment["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
    return value


def record_spec(deployment: dict[str, Any], spec_hash: str) -> None:
    """Annotate a Deployment with the hash of the spec from which its template was built."""
    deployment["metadata"].setdefault("annotations", {})[ANNOTATION_SPEC_HASH] = spec_hash


def with_template(deployment: dict[str, Any], template: dict[str, Any], spec_hash: str) -> dict[str, Any]:
    """Return a built Deployment with another template, and the hash of the spec behind that, stamped anew."""
    meta, spec = deployment["metadata"], deployment["spec"]
    made = {**deployment, "metadata": {**meta, "annotations": {}}, "spec": {**spec, "template": template}}
    record_spec(made, spec_hash)
    stamp(made)
    return made


def with_strategy(
    deployment: dict[str, Any], policy: RolloutPolicy, choice: Choice | None, *, held: bool = False
) -> dict[str, Any]:
    """Return a built Deployment with the strategy that was chosen for the rollout to its revision, stamped anew.

    Under `strategy: Auto`, the reason to replace pods in place is recorded in an annotation; and so is that the new pods are
    a canary, which is `held`.
    """
    meta, spec = deployment["metadata"], deployment["spec"]
    reason = rollout_strategy.replaces(policy, choice, revision(deployment))
    annotations = dict(meta["annotations"])
    if reason and policy.strategy == "Auto":
        annotations[ANNOTATION_REPLACE_REASON] = reason
    changes: dict[str, Any] = {"strategy": _strategy(policy, replace=bool(reason))}
    if held:
        annotations[ANNOTATION_CANARY] = revision(deployment)
        update = canary.rolling_update(policy, spec["replicas"], replace=bool(reason))
        changes = {"strategy": {"type": "RollingUpdate", "rollingUpdate": update}, **canary.held_seconds()}
    made = {
        **deployment,
        "metadata": {**meta, "annotations": annotations},
        "spec": {**spec, **changes},
    }
    stamp(made)
    return made


def placeholder(revision: str) -> dict[str, Any]:
    """Return the part of a template that the desired-state hash of a Deployment depends on."""
    return {"metadata": {"labels": {LABEL_REVISION: revision}}}


def stamp(deployment: dict[str, Any]) -> None:
    """Write the desired-state hash. Its template counts by its revision, which is a hash of the template already."""
    annotations = deployment["metadata"]["annotations"]
    annotations.pop(ANNOTATION_HASH, None)
    reduced = {**deployment, "spec": {**deployment["spec"], "template": revision(deployment)}}
    annotations[ANNOTATION_HASH] = digest(reduced)


def _strategy(policy: RolloutPolicy, *, replace: bool) -> dict[str, Any]:
    return {
        "type": "RollingUpdate",
        "rollingUpdate": rollout_strategy.rolling_update(policy, replace=replace),
    }


def progress_deadline_seconds(service: InferenceService) -> int:
    """Return the progress deadline; by default image pull, start, and a download that may take as long as a start."""
    given = service.spec.rollout.progress_deadline_seconds
    if given is not None:
        return given
    startup = service.spec.startup.timeout_seconds
    return _IMAGE_PULL_SECONDS + startup * (2 if service.source.is_fetched else 1)
