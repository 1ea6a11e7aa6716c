"""The pod template: containers, volumes and the security settings of the restricted Pod Security level."""

from typing import Any, Final

from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import containers, kernel_cache, overlay, pod_security, volumes
from skiff_operator.resources.metadata import (
    ANNOTATION_MODEL_CACHE,
    LABEL_REVISION,
    digest,
    labels,
    selector,
)
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

USER_ID: Final = 65532
_GRACE_MARGIN_SECONDS: Final = 10


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Merge the user's overlay into the template and label it with its own revision.

    Raises:
        InvalidSpec: the overlay needs a permission that the operator's settings do not give.
    """
    base: dict[str, Any] = {
        "metadata": {"labels": {**labels(service), contract.LABEL_ENGINE_TYPE: contract.ENGINE_TYPE}},
        "spec": _pod_spec(service, settings),
    }
    if service.mounted_cache.claim:
        base["metadata"]["annotations"] = {ANNOTATION_MODEL_CACHE: service.mounted_cache.name}
    template: dict[str, Any] = overlay.merge(base, service.spec.pod_template)
    if not settings.allow_privileged_pods:
        template["spec"] = pod_security.complete(template["spec"])
        pod_security.check(template, account=service.name)
    template["metadata"]["labels"][LABEL_REVISION] = digest(template)
    return template


def check_recorded(template: dict[str, Any], service: InferenceService, settings: Settings) -> None:
    """Check a template from a ControllerRevision: others may have written it, or the settings were different then.

    Raises:
        InvalidSpec: it has what the operator's settings do not permit.
    """
    try:
        if not settings.allow_privileged_pods:
            pod_security.check(template, account=service.name)
        hosts = [each["name"] for each in template["spec"].get("volumes") or [] if "hostPath" in each]
        if hosts and not settings.allow_host_path:
            raise InvalidSpec(f"volumes[{hosts[0]}]: hostPath volumes are off")
    except InvalidSpec as error:
        way_out = f"`skiff rollout upgrade {service.name}` builds another one"
        raise InvalidSpec(
            f"the recorded pod template is not permitted any more: {error}; {way_out}"
        ) from error


def grace_seconds(service: InferenceService) -> int:
    """Return the termination grace period in seconds: longer than a shutdown can take."""
    return containers.PRE_STOP_SECONDS + service.spec.drain.timeout_seconds + _GRACE_MARGIN_SECONDS


def _pod_spec(service: InferenceService, settings: Settings) -> dict[str, Any]:
    mounted = volumes.build(service)
    kernels = kernel_cache.build(service)
    spec: dict[str, Any] = {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        # Otherwise a Service named skiff-x in the namespace would set environment variables that look like options.
        "enableServiceLinks": False,
        "securityContext": security(),
        "terminationGracePeriodSeconds": grace_seconds(service),
        "containers": [
            containers.runtime(service, settings, [volume.mount() for volume in (*mounted, *kernels)])
        ],
        "volumes": [volume.volume() for volume in (*mounted, *kernels)],
    }
    if service.source.is_fetched:
        # A ModelCache is complete or its fetcher completes it; a pod must not write to what others use.
        writable = not service.mounted_cache.name
        shared = [volume.mount(writable=writable) for volume in mounted if not volume.serving]
        spec["initContainers"] = [containers.fetch(service, settings, shared)]
    if settings.default_image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.default_image_pull_secrets]
    if volumes.needs_claim(service):
        spec["affinity"] = same_node(service)
    if service.spec.node_selector:
        spec["nodeSelector"] = service.spec.node_selector
    if service.spec.tolerations:
        spec["tolerations"] = list(service.spec.tolerations)
    return spec


def security() -> dict[str, Any]:
    """Return the security settings of the pod that the restricted Pod Security level demands."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def same_node(service: InferenceService) -> dict[str, Any]:
    """Return a pod affinity: a ReadWriteOnce volume is attached to one node, and a pod elsewhere would never start."""
    term = {"labelSelector": {"matchLabels": selector(service)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
