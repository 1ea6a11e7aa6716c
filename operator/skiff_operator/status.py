"""Status reporting: conditions and status computed from observed facts. Pure: the time is an argument."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from skiff_operator import rollout_blockers
from skiff_operator.rollout_analysis import Analysis
from skiff_operator.spec import Canary
from skiff_operator.startup import PodStartup
from skiff_operator.timestamps import seconds_between
from skiff_operator.workload import Crash, PodState, Rollout
from skiff_runtime import contract

READY: Final = "Ready"
MODEL_READY: Final = "ModelReady"
AVAILABLE: Final = "Available"
PROGRESSING: Final = "Progressing"
DEGRADED: Final = "Degraded"
UPGRADE_AVAILABLE: Final = "UpgradeAvailable"
"""Present only while True: the pods have the template of another operator."""
ADAPTERS_READY: Final = "AdaptersReady"
ADAPTER_REFUSED: Final = "AdapterRefused"
"""Reason of an adapter that pods have refused."""
CONDITIONS: Final = (READY, MODEL_READY, AVAILABLE, PROGRESSING, DEGRADED)

SERVING: Final = "Serving"
SCALED_TO_ZERO: Final = "ScaledToZero"
ROLLED_BACK: Final = "RolledBack"

ROLLOUT_IN_PROGRESS: Final = "RolloutInProgress"
REPLACING: Final = "ReplacingPods"
CANARY: Final = "Canary"
PROMOTED: Final = "CanaryPromoted"
BLOCKED: Final = "RolloutBlocked"
DEADLINE_EXCEEDED: Final = "ProgressDeadlineExceeded"

_ROLLING_OUT: Final = (ROLLOUT_IN_PROGRESS, REPLACING, CANARY, BLOCKED, DEADLINE_EXCEEDED)
_MAX_CANARY_PODS: Final = 256
"""Pods of a canary that the status lists; a router takes others for pods of the old revision."""
_MESSAGE_CHARACTERS: Final = 1024
_OBSTACLE_CHARACTERS: Final = 600
_CREATION_SECONDS: Final = 15.0
"""A pod whose containers are not created within this time may have a volume that cannot be attached."""
_OVERDUE_SECONDS: Final = 30.0
"""A pod that exists for this long after its grace period is stuck: its node does not confirm its end."""
_WAITING_FOR_ROOM: Final = ("InsufficientGPU", "Unschedulable")
_FAILED_POD_SECONDS: Final = 600.0
"""A failed pod explains `Degraded` for at most this long; by then its replacement has started."""
_LOADING_REASONS: Final = {
    "Loading": "LoadingModel",
    "Creating": "CreatingContainers",
    "Fetching": "FetchingWeights",
    "Scheduling": "SchedulingPods",
}
"""Ordered from the phase nearest to serving to the farthest."""


class Problem(msgspec.Struct, frozen=True):
    """An obstacle to reconciling: an invalid spec, or a refusal of the API server."""

    reason: str
    message: str


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One entry of `status.conditions`. The time is RFC 3339 and moves only when `status` does."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: str
    observed_generation: int


class LastFailure(msgspec.Struct, frozen=True, rename="camel"):
    """The newest unsuccessful termination of a container: its cause, the redacted end of its output, and what to change."""

    pod: str
    reason: str
    exit_code: int
    log_tail: str
    at: str
    remedy: str = ""


class Scaling(msgspec.Struct, frozen=True, rename="camel"):
    """The last change of the number of pods under autoscaling: the number, the reason in words, and the time (RFC 3339)."""

    desired_replicas: int
    message: str
    at: str


class AdapterStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A LoRA adapter, as routers read it. `source`: the LoRAAdapter, or empty for one of the spec; `loaded_pods`: ready pods.

    `ready`: every ready pod answers for it.
    """

    name: str
    uri: str
    source: str = ""
    ready: bool = False
    loaded_pods: int = 0
    reason: str = ""
    message: str = ""


class CanaryHeader(msgspec.Struct, frozen=True):
    """The header of the requests that get to the canary."""

    name: str
    value: str


class CanaryStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The canary, as routers read it: its revision, its share of the requests, and the names of its pods.

    `weight` is 0 where a `header` decides. `started_at`: the time (RFC 3339) at which its first pod was ready, or empty.
    """

    revision: str
    pods: tuple[str, ...] = ()
    weight: int = 0
    header: CanaryHeader | None = None
    sticky_by: str = "Conversation"
    started_at: str = ""


class Status(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `status` of an InferenceService. Counts are pods."""

    observed_generation: int
    replicas: int
    ready_replicas: int
    updated_replicas: int
    selector: str
    url: str
    update_revision: str
    conditions: tuple[Condition, ...]
    current_revision: str = ""
    last_failure: LastFailure | None = None
    startup: PodStartup | None = None
    analysis: Analysis | None = None
    canary: CanaryStatus | None = None
    adapters: tuple[AdapterStatus, ...] = ()
    autoscaling: Scaling | None = None

    @property
    def analyzing(self) -> bool:
        """Return whether a rollout is being compared with the revision before it."""
        return self.analysis is not None and self.analysis.active

    @property
    def rolling_out(self) -> bool:
        """Return whether the desired revision is being rolled out, in time or not."""
        progressing = self.condition(PROGRESSING)
        return progressing is not None and progressing.reason in _ROLLING_OUT

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of a type, if present."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


@dataclass(kw_only=True, slots=True)
class Facts:
    """The inputs of a status, and what follows from them directly.

    `replicas` and `revision` are the desired ones (the last known ones while the spec is invalid); `synced` is true
    when the Deployment and the Service match them. `pods` are those of the Deployment that are not being deleted.
    `shortage` is a message when no node could hold a pod, `obstacle` an Event about a pod whose containers are not
    created. `draining` are the pods that are being deleted, and `announcement` describes a rollout that replaces pods
    in place. `outdated` is the version of the operator whose template the pods keep, if this one would build another.
    `scaling`: the last change of the number of pods, with autoscaling. `canary`: the policy of the canary that the new pods
    are. `adapters`: the LoRA adapters. `paused`: the rollout is paused. `restored`: the revision to which a rollback
    returned, or empty.

    The rest is derived. `live` are the pods that have not terminated, `new_pods` those of them that have the desired
    revision, and `older` the others; `new_ready` is the number of new pods that are ready. `placed` is true if a new
    pod has a node, or if no pod is desired. `serves` is true if the desired revision alone serves; with zero replicas
    no pod needs to be ready. `settled` is true if exactly the desired number of pods exists and all of them are ready.
    """

    name: str
    generation: int
    replicas: int
    revision: str
    url: str
    synced: bool
    rollout: Rollout | None
    pods: tuple[PodState, ...]
    problem: Problem | None
    shortage: str = ""
    outdated: str = ""
    paused: bool = False
    obstacle: Problem | None = None
    draining: tuple[PodState, ...] = ()
    announcement: str = ""
    restored: str = ""
    analysis: Analysis | None = None
    scaling: Scaling | None = None
    canary: Canary | None = None
    adapters: tuple[AdapterStatus, ...] = ()
    live: list[PodState] = field(init=False)
    new_pods: list[PodState] = field(init=False)
    older: list[PodState] = field(init=False)
    new_ready: int = field(init=False)
    placed: bool = field(init=False)
    serves: bool = field(init=False)
    settled: bool = field(init=False)

    def __post_init__(self) -> None:
        """Derive the other facts, once: every resync computes the status of every service."""
        self.live = [pod for pod in self.pods if is_live(pod)]
        self.new_pods = [pod for pod in self.live if pod.revision == self.revision]
        self.older = [pod for pod in self.live if pod.revision != self.revision]
        self.new_ready = sum([pod.ready for pod in self.new_pods])
        self.placed = self.replicas == 0 or any(pod.phase != "Scheduling" for pod in self.new_pods)
        alone = not self.older and self.canary is None
        self.serves = self.synced and alone and self.new_ready >= min(self.replicas, 1)
        replacing = self.rollout is not None and self.rollout.replacing
        all_ready = self.new_ready == len(self.new_pods) == self.replicas
        self.settled = self.serves and not replacing and all_ready


def report(facts: Facts, previous: Status | None, now: str) -> Status:
    """Compute the status of an InferenceService at `now` (RFC 3339) from the facts and the last written status."""
    concerned = _concerned(facts, now)
    trouble = facts.problem or _pod_trouble(facts, concerned, now)
    completed = _completed(facts, previous)
    verdicts = (
        _ready(facts, trouble, completed),
        _model_ready(facts, trouble),
        _available(facts),
        _progressing(facts, trouble, completed),
        _degraded(trouble),
        *_upgrade_available(facts),
        *_adapters_ready(facts),
    )
    before = {} if previous is None else {condition.type: condition for condition in previous.conditions}
    return Status(
        observed_generation=facts.generation,
        replicas=len(facts.live),
        ready_replicas=sum(pod.ready for pod in facts.live),
        updated_replicas=len(facts.new_pods),
        selector=f"{contract.LABEL_SERVICE}={facts.name}",
        url=facts.url,
        update_revision=facts.revision,
        conditions=tuple(
            dated(verdict, facts.generation, before.get(verdict[0]), now) for verdict in verdicts
        ),
        current_revision=completed,
        last_failure=_last_failure(facts, concerned, previous),
        startup=_startup(facts, previous),
        analysis=facts.analysis,
        canary=_canary(facts, previous, now),
        adapters=facts.adapters,
        autoscaling=facts.scaling,
    )


def _completed(facts: Facts, previous: Status | None) -> str:
    """Return the last revision that was Ready; after a rollback the restored one, once it alone serves."""
    if facts.serves:
        return facts.revision
    restored = [pod for pod in facts.live if pod.revision == facts.restored]
    if facts.restored and len(restored) == len(facts.live) and any(pod.ready for pod in restored):
        return facts.restored
    return previous.current_revision if previous else ""


Verdict = tuple[str, bool, str, str]
"""Condition type, whether it holds, reason, message."""


def _ready(facts: Facts, trouble: Problem | None, completed: str) -> Verdict:
    if facts.problem is not None and not facts.synced:
        return READY, False, facts.problem.reason, facts.problem.message
    if facts.serves and facts.replicas == 0:
        return READY, True, SCALED_TO_ZERO, "spec.replicas is 0"
    if facts.serves:
        return READY, True, SERVING, _count(facts)
    if trouble is not None:
        return READY, False, trouble.reason, trouble.message
    return READY, False, _movement(facts, completed), _count(facts)


def _model_ready(facts: Facts, trouble: Problem | None) -> Verdict:
    if facts.new_ready > 0:
        return MODEL_READY, True, "ModelLoaded", "the current revision answers"
    if trouble is not None:
        return MODEL_READY, False, trouble.reason, trouble.message
    if facts.replicas == 0:
        return MODEL_READY, False, SCALED_TO_ZERO, "spec.replicas is 0"
    phases = {pod.phase for pod in facts.new_pods}
    for phase, reason in _LOADING_REASONS.items():
        if phase in phases:
            return MODEL_READY, False, reason, f"no pod of revision {facts.revision} answers yet"
    return MODEL_READY, False, "NoPods", f"no pod of revision {facts.revision} exists yet"


def _available(facts: Facts) -> Verdict:
    if any(pod.ready for pod in facts.live):
        return AVAILABLE, True, "PodsReady", "requests are answered"
    if facts.replicas == 0:
        return AVAILABLE, False, SCALED_TO_ZERO, "spec.replicas is 0"
    return AVAILABLE, False, "NoReadyPods", "no pod answers requests"


def _progressing(facts: Facts, trouble: Problem | None, completed: str) -> Verdict:
    if facts.problem is not None and not facts.synced:
        return PROGRESSING, False, facts.problem.reason, facts.problem.message
    if facts.settled:
        return PROGRESSING, False, "RolloutComplete", f"all pods are of revision {facts.revision}"
    blocked = "" if trouble is None else _blocked(trouble)
    if facts.rollout is not None and facts.rollout.stalled:
        return PROGRESSING, False, DEADLINE_EXCEEDED, blocked or facts.rollout.stalled
    if facts.paused:
        return PROGRESSING, False, "RolloutPaused", f"{_count(facts)}; spec.rollout.paused is true"
    movement = _movement(facts, completed)
    if blocked:
        return (
            PROGRESSING,
            True,
            BLOCKED if movement == ROLLOUT_IN_PROGRESS else movement,
            f"{_count(facts)}: {blocked}",
        )
    if facts.canary is not None and facts.new_ready:
        return PROGRESSING, True, CANARY, _canary_share(facts, facts.canary)
    if movement == ROLLOUT_IN_PROGRESS and facts.announcement and completed:
        return PROGRESSING, True, REPLACING, _replacing(facts)
    return PROGRESSING, True, movement, _count(facts)


def _blocked(trouble: Problem) -> str:
    """Name an obstacle, with the way out."""
    text = trouble.message[:_OBSTACLE_CHARACTERS].rstrip(". ")
    return f"{trouble.reason}: {text}. Way out: {rollout_blockers.way_out(trouble.reason, trouble.message)}"


def _replacing(facts: Facts) -> str:
    """Describe a rollout that replaces pods in place, and the old pod for which it waits."""
    text = f"{facts.announcement}. {_count(facts)}"
    if not facts.draining or facts.new_ready == facts.replicas:
        return text
    last = max(facts.draining, key=_end)
    return f"{text}; pod {last.name} finishes its requests, until {last.ends_by} at the latest"


def _canary_share(facts: Facts, canary: Canary) -> str:
    """Describe the share of a canary, and its end."""
    share = f"{canary.weight}% of the requests"
    if canary.header is not None:
        share = f"requests with {canary.header.name}: {canary.header.value}"
    advice = f"`skiff rollout promote {facts.name}`"
    end = (
        f"a comparison of its requests, or {advice}, promotes it"
        if canary.auto_promote
        else f"{advice} promotes it"
    )
    count = "1 pod" if facts.new_ready == 1 else f"{facts.new_ready} pods"
    return f"revision {facts.revision} gets {share} on {count}; {end}"


def _canary(facts: Facts, previous: Status | None, now: str) -> CanaryStatus | None:
    """Return what routers need to know of a canary; its pods are listed before they are ready."""
    canary = facts.canary
    if canary is None:
        return None
    before = None if previous is None else previous.canary
    started_at = before.started_at if before is not None and before.revision == facts.revision else ""
    header = canary.header
    return CanaryStatus(
        revision=facts.revision,
        pods=tuple(sorted(pod.name for pod in facts.new_pods))[:_MAX_CANARY_PODS],
        weight=canary.weight if header is None else 0,
        header=None if header is None else CanaryHeader(header.name, header.value),
        sticky_by=canary.sticky_by,
        started_at=started_at or (now if facts.new_ready else ""),
    )


def _end(pod: PodState) -> tuple[str, str]:
    return pod.ends_by, pod.name


def _movement(facts: Facts, completed: str) -> str:
    """Return the reason for Progressing: a rollout, or scaling without one."""
    replacing = facts.rollout is not None and facts.rollout.replacing
    if facts.older or replacing or facts.revision != completed:
        return ROLLOUT_IN_PROGRESS
    return "PodsStopping" if len(facts.new_pods) > facts.replicas else "PodsStarting"


def _degraded(trouble: Problem | None) -> Verdict:
    if trouble is None:
        return DEGRADED, False, "AsExpected", "nothing is known to be wrong"
    return DEGRADED, True, trouble.reason, trouble.message


def _upgrade_available(facts: Facts) -> list[Verdict]:
    if not facts.outdated:
        return []
    advice = f"`skiff rollout upgrade {facts.name}` adopts the present one"
    message = f"the pods keep the template of operator {facts.outdated}; {advice}"
    return [(UPGRADE_AVAILABLE, True, "TemplatePinned", message)]


def _adapters_ready(facts: Facts) -> list[Verdict]:
    if not facts.adapters:
        return []
    missing = [each for each in facts.adapters if not each.ready]
    if not missing:
        return [
            (ADAPTERS_READY, True, "Loaded", f"every ready pod answers for {len(facts.adapters)} adapters")
        ]
    first = missing[0]
    message = f"{len(missing)} of {len(facts.adapters)} adapters are not ready; {first.name}: {first.message}"
    return [(ADAPTERS_READY, False, first.reason, message)]


def _count(facts: Facts) -> str:
    return f"{facts.new_ready} of {facts.replicas} pods of revision {facts.revision} answer"


def _concerned(facts: Facts, now: str) -> list[PodState]:
    """Return the pods that can explain a failure: live ones and, until the service recovers, recently failed ones."""
    if facts.settled or len(facts.live) == len(facts.pods):
        return facts.live
    return [
        pod for pod in facts.pods if not pod.ended or seconds_between(pod.ended, now) < _FAILED_POD_SECONDS
    ]


def _pod_trouble(facts: Facts, concerned: list[PodState], now: str) -> Problem | None:
    """Return the trouble that keeps pods from serving, of the desired revision first; ordered by name for stability.

    In a rollout that replaces pods in place, a new pod waits for the resources of an old one that finishes its requests:
    that is no trouble, until the old one is overdue.
    """
    if facts.shortage:
        return Problem("NoNodeLargeEnough", facts.shortage)
    makes_room = bool(facts.announcement) and (bool(facts.draining) or not facts.synced)
    overdue = _overdue(facts, now) if makes_room else None
    current = [pod for pod in concerned if pod.revision == facts.revision]
    for pod in sorted(current or concerned, key=lambda pod: (bool(pod.ended), pod.name)):
        if pod.trouble in _WAITING_FOR_ROOM and makes_room:
            if overdue is not None:
                return overdue
        elif pod.trouble:
            return Problem(pod.trouble, f"pod {pod.name}: {pod.message}")
    if facts.obstacle is not None:
        return facts.obstacle
    if facts.rollout is not None and facts.rollout.blocked and not makes_room:
        return Problem("PodCreateFailed", facts.rollout.blocked)
    if facts.rollout is not None and facts.rollout.stalled:
        return Problem(DEADLINE_EXCEEDED, facts.rollout.stalled)
    return None


def _overdue(facts: Facts, now: str) -> Problem | None:
    late = [pod for pod in facts.draining if seconds_between(pod.ends_by, now) > _OVERDUE_SECONDS]
    if not late:
        return None
    pod = min(late, key=_end)
    message = f"pod {pod.name} should have ended by {pod.ends_by}, and still holds what a new pod needs"
    return Problem("PodStuckTerminating", message)


def slow_pod(facts: Facts, now: str) -> PodState | None:
    """Return the pod of the desired revision that has waited longest for its containers, if that is suspiciously long."""
    pod = _waiting_pod(facts)
    if pod is None or seconds_between(pod.placed_at, now) < _CREATION_SECONDS:
        return None
    return pod


def slow_in_seconds(facts: Facts, now: str) -> float:
    """Return the seconds after which a waiting pod becomes slow; 0 when none waits, or one is slow already."""
    pod = _waiting_pod(facts)
    if pod is None:
        return 0.0
    return max(0.0, _CREATION_SECONDS - seconds_between(pod.placed_at, now))


def _waiting_pod(facts: Facts) -> PodState | None:
    waiting = [pod for pod in facts.new_pods if pod.placed_at and not pod.trouble]
    return min(waiting, key=lambda pod: (pod.placed_at, pod.name), default=None)


def is_live(pod: PodState) -> bool:
    """Return whether a pod has neither ended nor is being deleted."""
    return not pod.ended and not pod.terminating


def dated(verdict: Verdict, generation: int, before: Condition | None, now: str) -> Condition:
    """Return the condition of a verdict; its time is that of the one `before` unless the status changed."""
    kind, holds, reason, message = verdict
    status = "True" if holds else "False"
    same = before is not None and before.status == status
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message[:_MESSAGE_CHARACTERS],
        last_transition_time=before.last_transition_time if same and before else now,
        observed_generation=generation,
    )


def _last_failure(facts: Facts, concerned: list[PodState], previous: Status | None) -> LastFailure | None:
    """Return the newest crash among the pods, else the last one reported, until the service recovers."""
    crashes = [(pod.crash, pod.name) for pod in concerned if pod.crash is not None]
    if crashes:
        crash, pod = max(crashes, key=_moment)
        return LastFailure(pod, crash.reason, crash.exit_code, crash.log_tail, crash.at, crash.remedy)
    return None if previous is None or facts.settled else previous.last_failure


def _startup(facts: Facts, previous: Status | None) -> PodStartup | None:
    """Return the startup of the pod of the desired revision that became ready last, else the one reported before."""
    started = [pod.startup for pod in facts.new_pods if pod.startup is not None]
    if started:
        return max(started, key=lambda startup: (startup.at, startup.pod))
    return None if previous is None else previous.startup


def _moment(entry: tuple[Crash, str]) -> tuple[str, str]:
    return entry[0].at, entry[1]


def read(stored: object) -> Status | None:
    """Parse the status of an object; None when it has none, or one of another schema."""
    try:
        return msgspec.convert(stored, Status)
    except msgspec.ValidationError:
        return None
