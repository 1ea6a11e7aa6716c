"""Whether a live object still holds everything that the operator asked for. Pure.

The API server adds defaults and other controllers add fields of their own, so this is no equality: each
desired field must be there with an equal value, and anything else may be there too.
"""

from decimal import Decimal, InvalidOperation
from typing import Any, Final

_IDENTITIES: Final = ("name", "uid", "mountPath", "containerPort", "port")
_QUANTITY_MAPS: Final = ("requests", "limits")
_SUFFIXES: Final = {
    **{suffix: Decimal(10) ** power for suffix, power in zip("num", (-9, -6, -3), strict=True)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}


def covers(desired: Any, live: Any, *, quantity: bool = False) -> bool:
    """True when `live` contains `desired`. `quantity`: the values are amounts, `1000m` equals `1`."""
    if isinstance(desired, dict):
        return _covers_map(desired, live, quantity=quantity)
    if isinstance(desired, list | tuple):
        return _covers_list(desired, live)
    if quantity and live is not None:
        return bool(_amount(desired) == _amount(live))
    return bool(desired == live)


def _covers_map(desired: dict[str, Any], live: Any, *, quantity: bool) -> bool:
    if not isinstance(live, dict):
        return not desired and live is None
    for key, value in desired.items():
        amounts = quantity or key in _QUANTITY_MAPS or key == "sizeLimit"
        if key not in live:
            if value or value is False or value == 0:
                return value is False or value == 0
        elif not covers(value, live[key], quantity=amounts):
            return False
    return True


def _covers_list(desired: list[Any] | tuple[Any, ...], live: Any) -> bool:
    if not isinstance(live, list):
        return not desired and live is None
    identity = _identity(desired)
    if identity is None:
        return len(desired) == len(live) and all(map(covers, desired, live))
    by_identity = {item.get(identity): item for item in live if isinstance(item, dict)}
    return all(covers(item, by_identity.get(item[identity])) for item in desired)


def _identity(items: list[Any] | tuple[Any, ...]) -> str | None:
    """The field by which the entries of a list are known, when there is one; other lists have an order."""
    for key in _IDENTITIES:
        if items and all(isinstance(item, dict) and key in item for item in items):
            return key
    return None


def _amount(value: Any) -> Any:
    """A Kubernetes quantity as a number; what is none stays as it is."""
    text = str(value)
    digits = text.rstrip("numkKMGTPEi")
    try:
        return Decimal(digits) * _SUFFIXES.get(text[len(digits) :], Decimal(1))
    except InvalidOperation:
        return value
