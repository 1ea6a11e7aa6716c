"""The ModelCache of InferenceServices with `cache.prefetch`, which the operator makes. Pure.

It belongs to none of them, because an object of the cluster cannot belong to one of a namespace: its name is a hash of its
spec, so that all InferenceServices that need the same one share it, and it is deleted when none has used it for long.
"""

from typing import Any, Final

from skiff_operator import model_uri
from skiff_operator.kinds import MODEL_CACHE
from skiff_operator.resources import containers
from skiff_operator.resources.metadata import FIELD_MANAGER, digest
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

RETENTION_SECONDS: Final = 86_400
"""A day: a service that is deleted and made again finds its model."""
_PASSED_ON: Final = frozenset(
    {
        *("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"),
        *("AWS_REGION", "AWS_SKIP_SIGNATURE", "GOOGLE_SKIP_SIGNATURE"),
    }
)
"""Variables of the InferenceService without which a fetcher might not reach the source."""


def name(service: InferenceService, settings: Settings) -> str:
    """Return the name of the ModelCache for `service`."""
    return f"prefetch-{digest(_spec(service, settings))}"


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Build the ModelCache: the model of `service`, on the nodes that its pods may use."""
    return {
        "apiVersion": MODEL_CACHE.api_version,
        "kind": MODEL_CACHE.name,
        "metadata": {
            "name": name(service, settings),
            "labels": {contract.LABEL_MANAGED_BY: FIELD_MANAGER},
        },
        "spec": {**_spec(service, settings), "retentionSeconds": RETENTION_SECONDS},
    }


def _spec(service: InferenceService, settings: Settings) -> dict[str, Any]:
    model, env = service.spec.model, service.spec.runtime.env
    wanted: dict[str, Any] = {"uri": model.uri}
    if model.revision is not None:
        wanted["revision"] = model.revision
    address = model_uri.address(service.source.scheme, model.endpoint, env)
    if address:
        wanted["endpoint"] = address
    spec: dict[str, Any] = {"model": wanted}
    passed_on = {each["name"]: each for each in env if each["name"] in _PASSED_ON and "value" in each}
    if passed_on:
        spec["env"] = [passed_on[name] for name in sorted(passed_on)]
    if service.spec.node_selector:
        spec["nodeSelector"] = service.spec.node_selector
    tolerations = list(service.spec.tolerations)
    if containers.gpus(service):
        # Clusters add this toleration by themselves to pods that request GPUs, which fetchers do not.
        gpu = {
            "key": containers.gpu_resource(service, settings),
            "operator": "Exists",
            "effect": "NoSchedule",
        }
        tolerations += [] if gpu in tolerations else [gpu]
    if tolerations:
        spec["tolerations"] = tolerations
    return spec
