"""Canaries: a new revision that gets a share of the requests before it replaces the old one. Pure: the time is an argument.

A canary is a rollout that stops on its way. Its pods are ready and serve, but the Deployment does not count them as available
before `minReadySeconds`, which is a year while the canary is held: so it makes as many of them as its strategy allows, and
stops no old pod for them. A promotion sets `minReadySeconds` back, and the rollout goes on. Nothing else holds the canary,
so neither a restart of the operator nor its absence ends it, and strategies, revisions and the comparison of revisions are
those of any rollout.
"""

import math
import re
from typing import Any, Final

from skiff_operator.errors import InvalidSpec
from skiff_operator.rollout_analysis import Analysis
from skiff_operator.spec import RolloutAnalysis, RolloutPolicy
from skiff_operator.timestamps import seconds_between

HOLD_SECONDS: Final = 365 * 24 * 3600
"""`minReadySeconds` of a Deployment whose new pods are a canary."""
_DEADLINE_MARGIN_SECONDS: Final = 600
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")
_HOP_BY_HOP: Final = frozenset(
    {"authorization", "connection", "content-length", "host", "te", "trailer", "transfer-encoding", "upgrade"}
)


def count_pods(policy: RolloutPolicy, replicas: int) -> int:
    """Return the number of pods of a canary: its weight's share of all, rounded, and at least one."""
    assert policy.canary is not None, "it is held"
    return max(1, math.floor(replicas * policy.canary.weight / 100 + 0.5))


def rolling_update(policy: RolloutPolicy, replicas: int, *, replace: bool) -> dict[str, Any]:
    """Return the parameters of the RollingUpdate of a Deployment that is held: beside the old pods, or in the place of some."""
    pods = count_pods(policy, replicas)
    return {"maxSurge": 0, "maxUnavailable": pods} if replace else {"maxSurge": pods, "maxUnavailable": 0}


def held_seconds() -> dict[str, Any]:
    """Return the fields of a Deployment that hold its new pods; the deadline must be the longer one."""
    return {
        "minReadySeconds": HOLD_SECONDS,
        "progressDeadlineSeconds": HOLD_SECONDS + _DEADLINE_MARGIN_SECONDS,
    }


def promotion(policy: RolloutPolicy, analysis: Analysis | None, started_at: str, now: str) -> str:
    """Return the reason why a canary that no comparison has found worse may be promoted at `now`; empty if it may not yet.

    `started_at`: the time (RFC 3339) at which its first pod was ready, or empty.
    """
    canary, limits = policy.canary, policy.analysis
    if canary is None or not canary.auto_promote or policy.paused or analysis is None or not started_at:
        return ""
    if seconds_between(started_at, now) < canary.min_seconds or not _proves(limits, analysis):
        return ""
    found, old = analysis.candidate, analysis.baseline
    return (
        f"{found.failed_requests} of {found.requests} requests failed, "
        f"against {old.failed_requests} of {old.requests} of revision {old.revision}"
    )


def _proves(limits: RolloutAnalysis, analysis: Analysis) -> bool:
    """Return whether the candidate has served enough, and failed no more than the limits say."""
    found, old = analysis.candidate, analysis.baseline
    before = old.failed_requests / old.requests if old.requests else 0.0
    tolerated = max(limits.max_error_percent / 100, limits.max_error_ratio * before)
    return (
        analysis.active
        and found.requests >= limits.min_requests
        and found.failed_requests <= tolerated * found.requests
    )


def check(policy: RolloutPolicy) -> None:
    """Raise `InvalidSpec` when the canary's fields contradict others; the CRD's rules say the same."""
    canary = policy.canary
    if canary is None:
        return
    where: Final = "spec.rollout.canary"
    if not 1 <= canary.weight <= 99:
        raise InvalidSpec(f"{where}.weight: must be 1 to 99, the percentage of requests for the new revision")
    if canary.min_seconds < 0:
        raise InvalidSpec(f"{where}.minSeconds: must be 0 or more")
    if canary.auto_promote and not policy.analysis.enabled:
        raise InvalidSpec(
            f"{where}.autoPromote: revisions must be compared for it; set it to false, "
            "or spec.rollout.analysis.enabled to true"
        )
    header = canary.header
    if header is None:
        return
    if not _HEADER_NAME.fullmatch(header.name) or header.name.lower() in _HOP_BY_HOP:
        raise InvalidSpec(f"{where}.header.name: must be the name of a header of requests, such as X-Canary")
    if not _HEADER_VALUE.fullmatch(header.value):
        raise InvalidSpec(f"{where}.header.value: must be 1 to 256 printable ASCII characters")
