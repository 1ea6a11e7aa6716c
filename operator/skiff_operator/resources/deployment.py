"""The Deployment that runs the replicas and rolls them one by one without losing a request."""

from typing import Any, Final

from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import pod
from skiff_operator.resources.metadata import LABEL_REVISION, child, selector
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

_IMAGE_PULL_SECONDS: Final = 600


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Build the Deployment. A new pod must be ready before an old one stops (maxSurge 1, maxUnavailable 0)."""
    return child(
        DEPLOYMENT,
        service,
        spec={
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


def _deadline_seconds(service: InferenceService) -> int:
    """Return the progress deadline: image pull, start, and a download that may take as long as a start."""
    startup = service.spec.startup.timeout_seconds
    return _IMAGE_PULL_SECONDS + startup * (2 if service.source.is_fetched else 1)
