"""The PersistentVolume that offers a model's directory on the nodes to the claim of one InferenceService."""

from typing import Any

import msgspec

from skiff_operator.kinds import CLAIM, PERSISTENT_VOLUME
from skiff_operator.model_caches.spec import ModelCache, owner_reference
from skiff_operator.resources import model_cache_claim
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.workqueue import Key
from skiff_runtime import contract


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A live volume, the cache whose directory it is, and the claim for which it is reserved."""

    name: str
    uid: str
    cache: str
    claim: Key
    phase: str
    terminating: bool


def build(cache: ModelCache, key: Key) -> dict[str, Any]:
    """Build the volume for the InferenceService `key`, on the nodes that the cache selects."""
    namespace, service = key
    claim = {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "namespace": namespace,
        "name": model_cache_claim.name(service, cache.name),
    }
    spec: dict[str, Any] = {
        "capacity": {"storage": model_cache_claim.CAPACITY},
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": claim,
        # Not made by the kubelet of a node whose fetcher has not begun: it would belong to root.
        "hostPath": {"path": cache.directory, "type": "Directory"},
    }
    if cache.spec.node_selector:
        labels = sorted(cache.spec.node_selector.items())
        terms = [{"key": key, "operator": "In", "values": [value]} for key, value in labels]
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}
    return {
        "apiVersion": PERSISTENT_VOLUME.api_version,
        "kind": PERSISTENT_VOLUME.name,
        "metadata": {
            "name": model_cache_claim.volume_name(namespace, service, cache.name),
            "labels": {
                contract.LABEL_MANAGED_BY: FIELD_MANAGER,
                contract.LABEL_MODEL_CACHE: cache.name,
            },
            "ownerReferences": [owner_reference(cache)],
        },
        "spec": spec,
    }


def read(obj: dict[str, Any]) -> Volume:
    """Read a live volume."""
    meta, claim = obj["metadata"], obj["spec"].get("claimRef") or {}
    return Volume(
        name=meta["name"],
        uid=meta["uid"],
        cache=meta["labels"][contract.LABEL_MODEL_CACHE],
        claim=(claim.get("namespace", ""), claim.get("name", "")),
        phase=(obj.get("status") or {}).get("phase", ""),
        terminating="deletionTimestamp" in meta,
    )
