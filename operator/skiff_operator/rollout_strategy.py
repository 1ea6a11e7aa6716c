"""The rollout strategy: a new pod beside the old ones (Surge), or in the place of one (Replace). Pure.

With `strategy: Auto` the choice is made once for each rollout, when it begins, and recorded in an annotation of the
Deployment together with its reason. So it survives the operator, and being no part of the pod template it causes no
rollout itself.
"""

import math
import re
from typing import Any, Final

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_operator.spec import RolloutPolicy
from skiff_runtime import contract

ANNOTATION_REPLACE_REASON: Final = f"{contract.API_GROUP}/rollout-replace-reason"
"""On a Deployment under `strategy: Auto` whose pods are replaced in place: the reason."""

UNSCHEDULABLE_SECONDS: Final = 30.0
"""A pod beside the old ones that has been unschedulable for this long shows that there is no room for it."""
SCALE_UP_SECONDS: Final = 900.0
"""Time that a node autoscaler has for a node that it announced; the cluster-autoscaler's own limit."""

_REASON_CHARACTERS: Final = 300
_AMOUNT: Final = re.compile(r"[0-9]{1,5}|(100|[1-9]?[0-9])%")


class Choice(msgspec.Struct, frozen=True):
    """The strategy of the rollout to one revision under Auto: Surge while `replace_reason` is empty, else Replace."""

    revision: str
    replace_reason: str = ""


def no_room(shortage: str) -> str:
    """Return the reason to replace pods in place."""
    return f"no room for a pod beside the old ones ({shortage[:_REASON_CHARACTERS]})"


def replaces(policy: RolloutPolicy, choice: Choice | None, revision: str) -> str:
    """Return the reason why the pods of `revision` take the places of older ones; empty when they come beside them."""
    if policy.strategy == "Replace":
        return "spec.rollout.strategy is Replace"
    if policy.strategy == "Auto" and choice is not None and choice.revision == revision:
        return choice.replace_reason
    return ""


def rolling_update(policy: RolloutPolicy, *, replace: bool) -> dict[str, Any]:
    """Return the parameters of the Deployment's RollingUpdate."""
    if replace:
        return {"maxSurge": 0, "maxUnavailable": policy.max_unavailable or 1}
    unavailable = policy.max_unavailable if policy.strategy == "Surge" else None
    return {"maxSurge": policy.max_surge or 1, "maxUnavailable": unavailable or 0}


def announcement(policy: RolloutPolicy, reason: str, replicas: int) -> str:
    """Describe a rollout that replaces pods in place, and what keeps serving meanwhile."""
    at_once = min(unavailable(policy, replicas), replicas)
    pods = "one at a time" if at_once == 1 else f"{at_once} at a time"
    if at_once == replicas:
        subject = "its only pod is" if replicas == 1 else f"all {replicas} pods are"
        return f"{reason}: the service is interrupted while {subject} replaced"
    return f"{reason}: pods are replaced {pods}; {replicas - at_once} of {replicas} keep serving"


def unavailable(policy: RolloutPolicy, replicas: int) -> int:
    """Return the number of pods that are replaced at a time; as in a Deployment, percentages are rounded down to one or more."""
    given = policy.max_unavailable or 1
    if isinstance(given, str):
        return max(1, math.floor(replicas * int(given.removesuffix("%")) / 100))
    return max(1, given)


def check(policy: RolloutPolicy) -> None:
    """Raise `InvalidSpec` when the fields contradict the strategy; the CRD's rules say the same."""
    where: Final = "spec.rollout"
    for name, given in (("maxSurge", policy.max_surge), ("maxUnavailable", policy.max_unavailable)):
        if given is not None and not _AMOUNT.fullmatch(str(given)):
            raise InvalidSpec(
                f"{where}.{name}: must be a number of pods such as 1, or a percentage such as 25%"
            )
    if policy.strategy == "Replace" and policy.max_surge is not None:
        raise InvalidSpec(
            f"{where}.maxSurge: strategy Replace has no pod beside the old ones; remove it, or use Surge"
        )
    if is_zero(policy.max_surge):
        raise InvalidSpec(f"{where}.maxSurge: must be 1 or more; use strategy Replace for none")
    if policy.strategy != "Surge" and is_zero(policy.max_unavailable):
        raise InvalidSpec(
            f"{where}.maxUnavailable: must be 1 or more where pods may be replaced; "
            "use strategy Surge to keep every pod"
        )


def is_zero(amount: int | str | None) -> bool:
    """Return whether an amount is given and allows no pod."""
    return amount is not None and str(amount).removesuffix("%") == "0"
