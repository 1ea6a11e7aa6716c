"""The fetcher of a LoRAAdapter with credentials: a pod that downloads the adapter into the claim that the serving pods share.

Serving pods have no credentials, and get none by a change of adapters, because that would change their template. The finished
pod stays as the record of the download until its LoRAAdapter is deleted; if it is lost, another one finds the files complete.
"""

from typing import Any

from skiff_operator import model_uri, workload
from skiff_operator.kinds import LORA_ADAPTER, POD
from skiff_operator.lora.spec import LoRAAdapter
from skiff_operator.ownership import controller_uid
from skiff_operator.resources import containers, credentials, pod, volumes
from skiff_operator.resources.metadata import FETCHER, FIELD_MANAGER, digest, owner_reference
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_operator.status import Problem
from skiff_runtime import contract

_NAME_CHARACTERS = 40
_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
"""Default requests of the container that downloads an adapter; ``spec.model.fetch.resources`` overrides them."""


def name(service: InferenceService, adapter: LoRAAdapter, failed_uid: str = "") -> str:
    """Return the name of the pod: another one for other files, credentials or place, and behind one that has failed."""
    place = [
        volumes.adapters_directory(service),
        [each.volume() for each in _list_volumes(service)],
        service.uid if volumes.needs_claim(service) else "",  # a new service has a new claim of its own
    ]
    files = [adapter.spec.uri, adapter.spec.credentials_secret_ref]
    identity = digest([adapter.uid, *files, *place, failed_uid])
    return f"lora-{adapter.name[:_NAME_CHARACTERS].rstrip('-.')}-{identity[:10]}"


def build(
    service: InferenceService, adapter: LoRAAdapter, settings: Settings, failed_uid: str = ""
) -> dict[str, Any]:
    """Build the pod. It has the account, the nodes and the image of the serving pods, and not their labels."""
    mounted = _list_volumes(service)
    scheme = model_uri.parse(adapter.spec.uri, field="uri").scheme
    container = containers.fetch(service, settings, [each.mount(writable=True) for each in mounted])
    container["args"] = [
        contract.COMMAND_FETCH,
        *(contract.FLAG_MODEL, adapter.spec.uri),
        *(contract.FLAG_DOWNLOAD_DIR, volumes.adapters_directory(service)),
        contract.FLAG_ADAPTER_ONLY,
    ]
    container["resources"] = _resources(service.spec.model.fetch.resources)
    access = credentials.variables(scheme, adapter.spec.credentials_secret_ref)
    endpoint = (
        credentials.endpoint(scheme, service.spec.model.endpoint) if scheme == service.source.scheme else []
    )
    container["env"] = containers.variables(
        {"name": "HOME", "value": volumes.SCRATCH_DIRECTORY}, *service.spec.runtime.env, *endpoint, *access
    )
    spec: dict[str, Any] = {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        "securityContext": pod.security(),
        "containers": [container],
        "volumes": [each.volume() for each in mounted],
        "nodeSelector": service.spec.node_selector,
        "tolerations": list(service.spec.tolerations),
        "imagePullSecrets": [{"name": each} for each in settings.default_image_pull_secrets],
    }
    if volumes.needs_claim(service):
        spec["affinity"] = pod.same_node(service)
    return {
        "apiVersion": POD.api_version,
        "kind": POD.name,
        "metadata": {
            "name": name(service, adapter, failed_uid),
            "namespace": adapter.namespace,
            "labels": {
                contract.LABEL_NAME: FETCHER,
                contract.LABEL_INSTANCE: adapter.name,
                contract.LABEL_MANAGED_BY: FIELD_MANAGER,
            },
            "ownerReferences": [owner_reference(LORA_ADAPTER, adapter.name, adapter.uid, blocks=False)],
        },
        "spec": spec,
    }


def _resources(given: dict[str, Any]) -> dict[str, Any]:
    """Return the container's resources for those of ``spec.model.fetch``, which Kubernetes completes: a limit implies a request.

    They are not the server's: beside a server these would have to fit on the node a second time.
    """
    limits = given.get("limits", {})
    requests = {name: amount for name, amount in _REQUESTS.items() if name not in limits}
    return {"requests": requests | given.get("requests", {}), **({"limits": limits} if limits else {})}


def _list_volumes(service: InferenceService) -> list[volumes.Volume]:
    names = (volumes.SCRATCH, volumes.ADAPTERS if volumes.has_adapters_volume(service) else volumes.CACHE)
    return [each for each in volumes.build(service) if each.name in names]


def has_failed(live: dict[str, Any]) -> bool:
    """Return whether a pod will not run again, as one that was evicted or whose node was shut down."""
    return (live.get("status") or {}).get("phase") == "Failed"


def is_own(live: dict[str, Any], adapter: LoRAAdapter) -> bool:
    """Return whether a pod is the fetcher of an adapter, and not a foreign pod of the same name."""
    return controller_uid(live) == adapter.uid


def progress(live: dict[str, Any]) -> Problem | None:
    """Return why a download is not complete; None when it is."""
    if (live.get("status") or {}).get("phase") == "Succeeded":
        return None
    state = workload.read_pod(live, gpu_resource="")
    pod_name = live["metadata"]["name"]
    if state.trouble:
        return Problem("FetchFailed", f"pod {pod_name}: {state.trouble}: {state.message}")
    return Problem("Fetching", f"pod {pod_name} downloads it")
