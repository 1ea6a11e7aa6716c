"""Names, labels, owner references and the desired-state hash of every child."""

import hashlib
from typing import Any, Final

import msgspec

from skiff_operator.kinds import INFERENCE_SERVICE, Kind
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

FIELD_MANAGER: Final = "skiff-operator"
ANNOTATION_HASH: Final = f"{contract.API_GROUP}/desired-hash"
ANNOTATION_SPEC_HASH: Final = f"{contract.API_GROUP}/spec-hash"
"""Hash of the spec from which a pod template was built, on ControllerRevisions and Deployments."""
ANNOTATION_MODEL_CACHE: Final = f"{contract.API_GROUP}/model-cache"
"""The ModelCache whose shared claim a pod mounts. A claim alone does not show it: it may have other users."""
ANNOTATION_CANARY: Final = f"{contract.API_GROUP}/canary"
"""On a Deployment whose new pods are a canary: their revision."""
FETCHER: Final = "skiff-fetcher"
"""Name of the application of all pods that only download, by which network policies find them."""
LABEL_REVISION: Final = f"{contract.API_GROUP}/revision"


def selector(service: InferenceService) -> dict[str, str]:
    """Return the selector of a service's pods: one label, because the selector of a Deployment is immutable."""
    return {contract.LABEL_SERVICE: service.name}


def label_selector(wanted: dict[str, str]) -> str:
    """Return the labels as the selector of a list request."""
    return ",".join(f"{name}={value}" for name, value in sorted(wanted.items()))


def labels(service: InferenceService) -> dict[str, str]:
    """Return the labels of every child and every pod."""
    return {
        contract.LABEL_NAME: "skiff",
        contract.LABEL_INSTANCE: service.name,
        contract.LABEL_MANAGED_BY: FIELD_MANAGER,
        **selector(service),
    }


def owner_reference(kind: Kind, name: str, uid: str, *, blocks: bool = True) -> dict[str, Any]:
    """Return the reference to the controller of an object, which is garbage-collected with it.

    `blocks`: a deletion of the owner in the foreground waits for the object.
    """
    reference = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": name,
        "uid": uid,
        "controller": True,
    }
    return {**reference, "blockOwnerDeletion": True} if blocks else reference


def child(kind: Kind, service: InferenceService, *, name: str = "", **body: Any) -> dict[str, Any]:
    """Build an object of `kind`, owned by `service` and therefore garbage-collected with it."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": name or service.name,
            "namespace": service.namespace,
            "labels": labels(service),
            "ownerReferences": [owner_reference(INFERENCE_SERVICE, service.name, service.uid)],
        },
        **body,
    }


def digest(value: Any) -> str:
    """Return a short, stable hash of plain builtins, independent of key order."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def stamp(obj: dict[str, Any]) -> str:
    """Write the desired-state hash of an object into its annotations and return it."""
    value = digest(obj)
    obj["metadata"].setdefault("annotations", {})[ANNOTATION_HASH] = value
    return value


def digest_annotation(obj: dict[str, Any]) -> str:
    """Return the desired-state hash of a built or live object; empty when it has none."""
    value: str = (obj["metadata"].get("annotations") or {}).get(ANNOTATION_HASH, "")
    return value
