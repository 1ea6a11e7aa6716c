"""The Deployment that runs the replicas and rolls them one by one without losing a request."""

from typing import Any, Final

from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import pod
from skiff_operator.resources.metadata import (
    ANNOTATION_HASH,
    ANNOTATION_SPEC_HASH,
    LABEL_REVISION,
    child,
    digest,
    selector,
)
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

_IMAGE_PULL_SECONDS: Final = 600


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Build the Deployment. A new pod must be ready before an old one stops (maxSurge 1, maxUnavailable 0)."""
    paused = {"paused": True} if service.spec.rollout.paused else {}
    return child(
        DEPLOYMENT,
        service,
        spec={
            **paused,
            "replicas": service.spec.replicas,
            "selector": {"matchLabels": selector(service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "minReadySeconds": 2,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": _deadline_seconds(service),
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


def placeholder(revision: str) -> dict[str, Any]:
    """Return the part of a template that the desired-state hash of a Deployment depends on."""
    return {"metadata": {"labels": {LABEL_REVISION: revision}}}


def stamp(deployment: dict[str, Any]) -> None:
    """Write the desired-state hash. Its template counts by its revision, which is a hash of the template already."""
    reduced = {**deployment, "spec": {**deployment["spec"], "template": revision(deployment)}}
    deployment["metadata"]["annotations"][ANNOTATION_HASH] = digest(reduced)


def _deadline_seconds(service: InferenceService) -> int:
    """Return the progress deadline: image pull, start, and a download that may take as long as a start."""
    startup = service.spec.startup.timeout_seconds
    return _IMAGE_PULL_SECONDS + startup * (2 if service.source.scheme == "hf" else 1)
