"""The shared claim of a ModelCache, where it is made and not an existing one."""

from typing import Any

from skiff_operator.kinds import CLAIM
from skiff_operator.model_caches.spec import ModelCache, owner_reference
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_runtime import contract


def target_name(cache: ModelCache) -> str:
    """Return `NAMESPACE/CLAIM`, which stands for the shared claim where node names are expected."""
    assert cache.claim is not None, "nodes keep the model"
    return f"{cache.claim.namespace}/{cache.claim_name}"


def build(cache: ModelCache) -> dict[str, Any]:
    """Build the claim, which is deleted with the ModelCache."""
    assert cache.claim is not None, "nodes keep the model"
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": str(cache.claim.size)}},
    }
    if cache.claim.storage_class_name is not None:
        spec["storageClassName"] = cache.claim.storage_class_name
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "metadata": {
            "name": cache.claim_name,
            "namespace": cache.claim.namespace,
            "labels": {contract.LABEL_MANAGED_BY: FIELD_MANAGER, contract.LABEL_MODEL_CACHE: cache.name},
            "ownerReferences": [owner_reference(cache)],
        },
        "spec": spec,
    }
