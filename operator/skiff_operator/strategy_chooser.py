"""The choice between Surge and Replace under `strategy: Auto`: before a rollout begins, and once more when it is stuck.

Before: a pod beside the old ones if a node has room for it; in the place of an old one if that alone gives it room. If
neither is known, or neither helps, the rollout begins with a pod beside the old ones, which never harms. Once that
pod has been unschedulable for a while, or a quota forbids it, old pods are replaced in place if the new one fits
where they are and no node autoscaler has announced a node.
"""

import time
from typing import Any, Final, NamedTuple

from skiff_operator import rollout_strategy, status
from skiff_operator.cache import Entry
from skiff_operator.capacity import Room
from skiff_operator.pod_events import PodEvents
from skiff_operator.rollout_strategy import SCALE_UP_SECONDS, UNSCHEDULABLE_SECONDS, Choice
from skiff_operator.room import RoomFinder
from skiff_operator.spec import InferenceService
from skiff_operator.timestamps import seconds_between
from skiff_operator.workload import PodState, Rollout

_QUOTA: Final = "exceeded quota"
_MAX_REMEMBERED: Final = 1024


class Reconsideration(NamedTuple):
    """The result of another look at a rollout: another choice, or the seconds after which to look again, or neither."""

    choice: Choice | None = None
    again_seconds: float = 0.0


class StrategyChooser:
    """Chooses the strategy of rollouts whose policy leaves it to the operator."""

    def __init__(self, room: RoomFinder, pod_events: PodEvents) -> None:
        """Estimate with `room`, and look for announced nodes in `pod_events`."""
        self._room = room
        self._pod_events = pod_events
        self._looked_at: dict[str, float] = {}
        """Times of the last looks at stuck rollouts, by uid of the InferenceService."""

    def is_due(self, entry: Entry, revision: str) -> bool:
        """Return whether the next write begins a rollout to `revision` for which no strategy was chosen yet."""
        rollout = _automatic(entry)
        if rollout is None or rollout.revision in ("", revision):
            return False
        decided = entry.decision is not None and entry.decision.revision == revision
        return not decided and bool(_older(entry, revision))

    async def choose(self, service: InferenceService, revision: str, pod_spec: dict[str, Any]) -> Choice:
        """Choose the strategy of a rollout to `revision` that is about to begin."""
        return choose(revision, await self._room.find(service, revision, pod_spec))

    async def reconsider(
        self, entry: Entry, revision: str, pod_spec: dict[str, Any], now: str
    ) -> Reconsideration:
        """Look at a rollout to `revision` again whose pod beside the old ones may be stuck, at `now` (RFC 3339)."""
        stuck = _stuck(entry, revision)
        if stuck is None or entry.service is None:
            return Reconsideration()
        pod, obstacle = stuck
        if pod is not None:
            age = seconds_between(pod.unschedulable_since, now)
            if age < UNSCHEDULABLE_SECONDS:
                return Reconsideration(again_seconds=UNSCHEDULABLE_SECONDS - age)
        if self._looked_recently(entry.uid):
            return Reconsideration()
        if pod is not None and age < SCALE_UP_SECONDS:
            since = pod.unschedulable_since
            if await self._pod_events.scale_up_announced(entry.service.namespace, pod.uid, since=since):
                return Reconsideration()
        room = await self._room.find(entry.service, revision, pod_spec) if pod is not None else None
        helps = room is not None and not room.fits_surge and room.fits_replace
        if helps or await self._room.fits_in_place(entry.service, revision, pod_spec):
            return Reconsideration(choice=Choice(revision, rollout_strategy.no_room(obstacle)))
        return Reconsideration()

    def _looked_recently(self, uid: str) -> bool:
        now = time.monotonic()
        if now - self._looked_at.get(uid, -self._room.fresh_seconds) < self._room.fresh_seconds:
            return True
        if len(self._looked_at) >= _MAX_REMEMBERED:
            self._looked_at.clear()
        self._looked_at[uid] = now
        return False


def choose(revision: str, room: Room | None) -> Choice:
    """Choose the strategy of a rollout to `revision` by the room for it; None: it is unknown."""
    if room is None or room.fits_surge or not room.fits_replace:
        return Choice(revision)
    return Choice(revision, rollout_strategy.no_room(room.shortage))


def may_be_stuck(entry: Entry, revision: str) -> bool:
    """Return whether a rollout to `revision` is to be looked at again."""
    return _stuck(entry, revision) is not None


def _automatic(entry: Entry) -> Rollout | None:
    """Return the Deployment's progress if the strategy of its rollout is the operator's choice."""
    service = entry.service
    if service is None or service.spec.rollout.strategy != "Auto" or service.spec.replicas == 0:
        return None
    return entry.rollout


def _older(entry: Entry, revision: str) -> list[PodState]:
    """Return the live pods of other revisions."""
    return [pod for pod in entry.pods.values() if status.is_live(pod) and pod.revision != revision]


def _stuck(entry: Entry, revision: str) -> tuple[PodState | None, str] | None:
    """Return the new pod that finds no node and the obstacle, or None and a quota's refusal; None for neither."""
    rollout = _automatic(entry)
    if rollout is None or rollout.revision != revision or not _older(entry, revision):
        return None
    if entry.service is not None and rollout_strategy.replaces(
        entry.service.spec.rollout, entry.choice, revision
    ):
        return None
    waiting = [
        pod
        for pod in entry.pods.values()
        if pod.revision == revision and pod.unschedulable_since and status.is_live(pod)
    ]
    if waiting:
        oldest = min(waiting, key=lambda pod: (pod.unschedulable_since, pod.name))
        return oldest, oldest.message.partition(". preemption")[0].rstrip(".")
    return (None, rollout.blocked) if _QUOTA in rollout.blocked else None
