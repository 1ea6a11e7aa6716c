"""Ownership of live objects: whose they are by their controller reference, and which of their fields are ours.

Names are shared with everybody who may write to a namespace, so the operator reads before it writes: an object is
its own only when the controller is the InferenceService of that uid. All else about it, labels included, proves nothing.
"""

from typing import Any

from skiff_operator.errors import Permanent
from skiff_operator.kinds import INFERENCE_SERVICE, SERVICE_ACCOUNT, Kind
from skiff_operator.resources.metadata import FIELD_MANAGER

_RESERVED = frozenset({(SERVICE_ACCOUNT, "default")})
"""Children that every namespace has of itself, or will have in a moment."""


class NameTaken(Permanent):
    """Another object, which is not ours, has the name that a child needs."""

    reason = "NameConflict"


def controller(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the owner reference of the controller; empty when there is none."""
    owners = obj["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def controller_uid(obj: dict[str, Any]) -> str:
    """Return the uid of the controller; empty when there is none."""
    uid: str = controller(obj).get("uid", "")
    return uid


def require_free(kind: Kind, name: str) -> None:
    """Raise `NameTaken` for a name that belongs to the namespace itself, even where nothing has it yet."""
    if (kind, name) in _RESERVED:
        raise NameTaken(f"{kind.name} {name} belongs to the namespace; rename the InferenceService")


def require_owned(kind: Kind, live: dict[str, Any], *, service: str, uid: str) -> None:
    """Raise `NameTaken`, which says whose the object is, unless the InferenceService of this uid controls it."""
    owner = controller(live)
    if owner.get("uid") == uid:
        return
    name = live["metadata"]["name"]
    if owner and (owner["kind"], owner["name"]) == (INFERENCE_SERVICE.name, service):
        raise NameTaken(
            f"{kind.name} {name} belongs to an earlier InferenceService {service} and is not deleted yet"
        )
    whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no controller"
    raise NameTaken(
        f"{kind.name} {name} exists and is not this InferenceService's: it {whose}; "
        "delete it or rename the InferenceService"
    )


def migrated_fields(live: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the managedFields with which server-side apply owns what was created; None when it does already.

    The API server keeps the fields of a creation in an entry `Update` of the manager, those of its applies in an
    entry `Apply`, and an apply removes only what the latter has alone. So the former is turned into the latter.
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
