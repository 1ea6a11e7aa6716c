"""The status of adapters, in the InferenceService and in each LoRAAdapter. Pure."""

from typing import Final

import msgspec

from skiff_operator.status import READY, AdapterStatus, Condition, dated

LOADED: Final = "Loaded"
LOADING: Final = "Loading"
NO_PODS: Final = "NoPods"


class ObjectStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `status` of a LoRAAdapter. `name`: by which clients request it; `loaded_pods`: ready pods that answer for it."""

    observed_generation: int
    conditions: tuple[Condition, ...]
    name: str = ""
    loaded_pods: int = 0


def object_status(
    found: AdapterStatus, generation: int, previous: ObjectStatus | None, now: str
) -> ObjectStatus:
    """Compute the status of a LoRAAdapter at `now` (RFC 3339) from the one of its adapter."""
    before = None if previous is None else next(iter(previous.conditions), None)
    verdict = (READY, found.ready, found.reason, found.message)
    return ObjectStatus(
        observed_generation=generation,
        conditions=(dated(verdict, generation, before, now),),
        name=found.name,
        loaded_pods=found.loaded_pods,
    )


def read(stored: object) -> ObjectStatus | None:
    """Parse the status of an object; None when it has none, or one of another schema."""
    try:
        return msgspec.convert(stored, ObjectStatus)
    except msgspec.ValidationError:
        return None
