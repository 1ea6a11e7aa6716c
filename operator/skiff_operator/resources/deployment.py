"""The Deployment that runs the replicas and rolls them one by one without losing a request."""

from typing import Any, Final

from skiff_operator import rollout_strategy
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import pod
from skiff_operator.resources.metadata import LABEL_REVISION, child, selector
from skiff_operator.rollout_strategy import ANNOTATION_REPLACE_REASON, Choice
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

_IMAGE_PULL_SECONDS: Final = 600


def build(service: InferenceService, settings: Settings, choice: Choice | None = None) -> dict[str, Any]:
    """Build the Deployment. By default a new pod must be ready before an old one stops (maxSurge 1, maxUnavailable 0).

    `choice`: the strategy that was chosen for the rollout to one revision under `strategy: Auto`.
    """
    template = pod.build(service, settings)
    policy = service.spec.rollout
    reason = rollout_strategy.replaces(policy, choice, template["metadata"]["labels"][LABEL_REVISION])
    built = child(
        DEPLOYMENT,
        service,
        spec={
            "replicas": service.spec.replicas,
            "selector": {"matchLabels": selector(service)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": rollout_strategy.rolling_update(policy, replace=bool(reason)),
            },
            "minReadySeconds": 2,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": policy.progress_deadline_seconds or _deadline_seconds(service),
            "template": template,
        },
    )
    if reason and policy.strategy == "Auto":
        built["metadata"]["annotations"] = {ANNOTATION_REPLACE_REASON: reason}
    return built


def revision(deployment: dict[str, Any]) -> str:
    """Return the revision label of a built Deployment's pods."""
    value: str = deployment["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
    return value


def _deadline_seconds(service: InferenceService) -> int:
    """Return the progress deadline: image pull, start, and a download that may take as long as a start."""
    startup = service.spec.startup.timeout_seconds
    return _IMAGE_PULL_SECONDS + startup * (2 if service.source.scheme == "hf" else 1)
