"""Drift detection: the comparison of a live object with the desired one. Pure.

The API server adds defaults and other controllers add fields of their own, so the comparison is containment: each
desired field must be present with an equal value, and other fields are ignored, except in atomic fields. A desired
False, 0, empty string, map or list may be absent, because the API server omits the zero value of most fields. It does
store the zero value of some fields, whose absence means something else; their absence is drift.
"""

from decimal import Decimal, InvalidOperation
from typing import Any, Final

_IDENTITIES: Final = ("uid", "mountPath", "containerPort", "name", "port")
_QUANTITY_MAPS: Final = ("requests", "limits")
_MAPS: Final = ("labels", "annotations", "matchLabels", "selector", "nodeSelector", *_QUANTITY_MAPS)
"""Fields whose value is a map with arbitrary keys; each key is stored even with an empty value."""

_ATOMIC: Final = ("podSelector", "namespaceSelector", "ingress", "egress")
"""Fields that an apply replaces whole. They hold nothing but what is desired: one more peer would open the pods."""

_STORED_ZEROS: Final = frozenset(
    {
        *("affinity", "nodeAffinity", "podAffinity", "podAntiAffinity", "emptyDir", "securityContext"),
        *("allowPrivilegeEscalation", "automountServiceAccountToken", "enableServiceLinks", "hostUsers"),
        *("privileged", "readOnlyRootFilesystem", "runAsGroup", "runAsNonRoot", "runAsUser", "fsGroup"),
        *("setHostnameAsFQDN", "shareProcessNamespace", "optional", "tolerationSeconds"),
        *("replicas", "maxSurge", "maxUnavailable"),
        *("podSelector", "namespaceSelector"),
    }
)
"""Fields that the API server stores even with their zero value (pointers in its Go types)."""

_SUFFIXES: Final = {
    **{suffix: Decimal(10) ** power for suffix, power in zip("num", (-9, -6, -3), strict=True)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}


def covers(desired: Any, live: Any, *, quantity: bool = False) -> bool:
    """Return whether `live` contains `desired`. `quantity`: values are Kubernetes quantities, where `1000m` equals `1`."""
    if desired is None:
        return True  # null means the default
    if isinstance(desired, dict):
        return isinstance(live, dict) and _covers_map(desired, live)
    if isinstance(desired, list | tuple):
        return isinstance(live, list) and _covers_list(desired, live)
    if quantity and live is not None:
        return bool(amount(desired) == amount(live))
    return bool(desired == live)


def _covers_map(
    desired: dict[str, Any], live: dict[str, Any], *, quantity: bool = False, free_keys: bool = False
) -> bool:
    for key, value in desired.items():
        found = live.get(key)
        if found is None:
            if free_keys or not _may_be_absent(key, value):
                return False
        elif key in _MAPS and isinstance(value, dict) and isinstance(found, dict):
            if not _covers_map(value, found, quantity=key in _QUANTITY_MAPS, free_keys=True):
                return False
        elif key in _ATOMIC:
            if not (covers(value, found) and covers(found, value)):
                return False
        elif not covers(value, found, quantity=quantity or key == "sizeLimit"):
            return False
    return True


def _may_be_absent(key: str, value: Any) -> bool:
    """Return whether the API server may omit a desired field: every value in it is its zero value."""
    if value is None:
        return True
    if key in _STORED_ZEROS:
        return False
    if isinstance(value, dict):
        return all(key not in _MAPS and _may_be_absent(inner, each) for inner, each in value.items())
    return not value


def _covers_list(desired: list[Any] | tuple[Any, ...], live: list[Any]) -> bool:
    identity = _identity(desired or live)
    if identity is None:
        return len(desired) == len(live) and all(map(covers, desired, live))
    by_identity = {item.get(identity): item for item in live if isinstance(item, dict)}
    return all(covers(item, by_identity.get(item[identity])) for item in desired)


def _identity(items: list[Any] | tuple[Any, ...]) -> str | None:
    """Return the field that identifies the entries of a list; None for ordered lists."""
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    for key in _IDENTITIES:
        if all(key in item for item in items) and len({str(item[key]) for item in items}) == len(items):
            return key
    return None


def amount(value: Any) -> Any:
    """Parse a Kubernetes quantity as a number; other values are returned unchanged."""
    text = str(value)
    digits = text.rstrip("numkKMGTPEi")
    try:
        return Decimal(digits) * _SUFFIXES.get(text[len(digits) :], Decimal(1))
    except InvalidOperation:
        return value
