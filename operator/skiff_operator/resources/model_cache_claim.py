"""The PersistentVolumeClaim by which an InferenceService mounts the model that a ModelCache keeps on nodes, read-only.

It is reserved for one PersistentVolume, and the volume for it: `model_caches.volume` builds the other side.
"""

from typing import Any, Final

from skiff_operator.kinds import CLAIM
from skiff_operator.resources.metadata import ANNOTATION_MODEL_CACHE, child, digest
from skiff_operator.spec import InferenceService, MountedCache
from skiff_runtime import contract

CAPACITY: Final = "1Gi"
"""Nothing enforces the capacity of a directory; the claim and the volume need the same one."""
_INFIX: Final = ".skiff-model."
"""The chart's admission policy knows claims of ModelCaches by it."""


def name(service: str, cache: str) -> str:
    """Return the name of the claim. A dot is in the name of no InferenceService and of no ModelCache."""
    return f"{service}{_INFIX}{cache}"


def cache_of(claim: str, service: str) -> str:
    """Return the ModelCache of a claim's name; empty for any other claim."""
    prefix = f"{service}{_INFIX}"
    return claim.removeprefix(prefix) if claim.startswith(prefix) else ""


def directory(cache: str) -> str:
    """Return the directory of a ModelCache in a shared claim, which may contain other files."""
    return f"skiff-models/{cache}"


def volume_name(namespace: str, service: str, cache: str) -> str:
    """Return the name of the volume for the claim."""
    return f"skiff-model-{digest([cache, namespace, service])}"


def mounted_cache(deployment: dict[str, Any]) -> MountedCache:
    """Return the ModelCache that the pods of a live Deployment mount."""
    service, template = deployment["metadata"]["name"], deployment["spec"]["template"]
    shared = (template["metadata"].get("annotations") or {}).get(ANNOTATION_MODEL_CACHE, "")
    for volume in template["spec"].get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if shared and volume["name"] == "cache":
            return MountedCache(shared, claim)
        if found := cache_of(claim, service):
            return MountedCache(found)
    return MountedCache()


def build(service: InferenceService, cache: str) -> dict[str, Any]:
    """Build the claim."""
    claim = child(
        CLAIM,
        service,
        name=name(service.name, cache),
        spec={
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",  # or else the default class would make another volume
            "volumeName": volume_name(service.namespace, service.name, cache),
            "resources": {"requests": {"storage": CAPACITY}},
        },
    )
    claim["metadata"]["labels"][contract.LABEL_MODEL_CACHE] = cache
    return claim
