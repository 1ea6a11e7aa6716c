"""Ownership of live objects: by controller reference, and of their fields by field manager.

Anybody with write access to a namespace may use any name in it, so the operator reads before it writes: an object is
owned only when its controller reference has the uid of the InferenceService. Nothing else, labels included, proves it.

The garbage collector of Kubernetes deletes the children of a deleted InferenceService, but not all of them: when its
watch is interrupted while the InferenceService is deleted and created again under the same name, its informer reports
one update from the one uid to the other, and the children of the former stay for ever. `sole_owner_uid` says which
objects the garbage collector would delete with their InferenceService, and the operator deletes only such objects.
"""

from typing import Any

from skiff_operator.errors import Permanent
from skiff_operator.kinds import INFERENCE_SERVICE, SERVICE_ACCOUNT, Kind
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_runtime import contract

_RESERVED = frozenset({(SERVICE_ACCOUNT, "default")})
"""Names that every namespace has by itself, or soon will have."""
_ORPHAN_FINALIZER = "orphan"
"""The API server sets it for a deletion that must not reach the dependents of the object."""


class NameTaken(Permanent):
    """An object that is not ours has the name of a child."""

    reason = "NameConflict"


def controller(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the owner reference of the controller; empty when there is none."""
    owners = obj["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def controller_uid(obj: dict[str, Any]) -> str:
    """Return the uid of the controller; empty when there is none."""
    uid: str = controller(obj).get("uid", "")
    return uid


def sole_owner_uid(obj: dict[str, Any], *, service: str) -> str:
    """Return the uid of the InferenceService `service` that controls an object and is its only owner.

    It is empty for every object that the garbage collector would not delete with that InferenceService alone, and for
    one whose deletion has begun.
    """
    meta = obj["metadata"]
    owner = controller(obj)
    identity = (str(owner.get("apiVersion", "")).partition("/")[0], owner.get("kind"), owner.get("name"))
    if identity != (contract.API_GROUP, INFERENCE_SERVICE.name, service) or len(meta["ownerReferences"]) != 1:
        return ""
    if "deletionTimestamp" in meta or _ORPHAN_FINALIZER in (meta.get("finalizers") or []):
        return ""
    uid: str = owner["uid"]
    return uid


def require_free(kind: Kind, name: str) -> None:
    """Raise `NameTaken` for a name that is reserved in every namespace, even before an object has it."""
    if (kind, name) in _RESERVED:
        raise NameTaken(f"{kind.name} {name} belongs to the namespace; rename the InferenceService")


def require_owned(kind: Kind, live: dict[str, Any], *, service: str, uid: str) -> None:
    """Raise `NameTaken`, naming the owner of the object, unless the InferenceService of this uid controls it."""
    owner = controller(live)
    if owner.get("uid") == uid:
        return
    name = live["metadata"]["name"]
    if owner and (owner["kind"], owner["name"]) == (INFERENCE_SERVICE.name, service):
        raise NameTaken(
            f"{kind.name} {name} belongs to an earlier InferenceService {service} and is not deleted yet"
        )
    owned_by = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no controller"
    raise NameTaken(
        f"{kind.name} {name} exists and is not this InferenceService's: it {owned_by}; "
        "delete it or rename the InferenceService"
    )


def migrated_fields(live: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return managedFields that transfer the fields of our creation to server-side apply; None when none need it.

    The API server tracks the fields of a creation in an `Update` entry of the manager and those of applies in an
    `Apply` entry, and an apply removes only fields of the latter. So the `Update` entry becomes an `Apply` entry.
    """
    entries = live["metadata"].get("managedFields") or []
    created = [entry for entry in entries if _is_ours(entry, "Update")]
    if not created:
        return None
    merged = created[0] | {"operation": "Apply"}
    for entry in (*created[1:], *(entry for entry in entries if _is_ours(entry, "Apply"))):
        merged["fieldsV1"] = _union(merged["fieldsV1"], entry["fieldsV1"])
    others = [entry for entry in entries if not (_is_ours(entry, "Update") or _is_ours(entry, "Apply"))]
    return [*others, merged]


def _is_ours(entry: dict[str, Any], operation: str) -> bool:
    whole = not entry.get("subresource")
    return whole and (entry["manager"], entry["operation"]) == (FIELD_MANAGER, operation)


def _union(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Unite two sets of fields, which are trees of maps."""
    return left | {key: _union(left.get(key, {}), fields) for key, fields in right.items()}
