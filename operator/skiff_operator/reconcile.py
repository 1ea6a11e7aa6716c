"""One idempotent reconcile of an InferenceService: observe, plan, apply, report."""

from typing import Any, NamedTuple

from skiff_operator import plan, rollout_strategy, status
from skiff_operator.apply import Applier, Failure, Goal, clock
from skiff_operator.cache import DesiredState, Entry, Objects
from skiff_operator.errors import ApiFailed, InvalidSpec, Permanent
from skiff_operator.events import Announcement
from skiff_operator.kinds import DEPLOYMENT, SERVICE, Stage
from skiff_operator.nodes import Nodes
from skiff_operator.observe import Observer
from skiff_operator.pod_events import PodEvents
from skiff_operator.resources import containers
from skiff_operator.resources import service as service_builder
from skiff_operator.scale_in import ScaleIn
from skiff_operator.settings import Settings
from skiff_operator.strategy_chooser import StrategyChooser, may_be_stuck
from skiff_operator.workqueue import Key


class Outcome(NamedTuple):
    """Result of one reconcile: `stage` is set when steps remain; `refused` when only a later retry may help.

    `again_seconds`: after this long, the status may change without an event.
    """

    stage: Stage | None = None
    refused: bool = False
    again_seconds: float = 0.0


class Reconciler:
    """Brings the cluster closer to one spec, the most urgent stage at a time."""

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        nodes: Nodes,
        pod_events: PodEvents,
        chooser: StrategyChooser,
        scale_in: ScaleIn,
        settings: Settings,
    ) -> None:
        """Read through `observer`, `nodes` and `pod_events`, write through `applier`.

        `chooser` chooses rollout strategies, `scale_in` the pods that a scale-in takes.
        """
        self._observer = observer
        self._applier = applier
        self._nodes = nodes
        self._pod_events = pod_events
        self._chooser = chooser
        self._scale_in = scale_in
        self._settings = settings

    async def reconcile(self, key: Key) -> Outcome:
        """Take the next steps for `key`.

        Raises:
            Retryable: try again later. What the API server refuses is reported in the status instead.
        """
        entry = self._observer.cache.get(key)
        if entry is None or not entry.present or entry.deleting:
            return Outcome()
        try:
            desired = self._desired(entry)
            pending = plan.steps(entry, desired)
            goal = Goal(entry.uid, desired, self._manifests(entry) if pending else {})
        except InvalidSpec as error:
            entry.problem = status.Problem(error.reason, str(error))
            await self._report(key, entry, _pending(entry))
            return Outcome()
        if pending and self._chooser.is_due(entry, desired.revision):
            await self._choose_strategy(key, entry, desired)
            return await self.reconcile(key)
        steps, later = plan.first_stage(pending)
        if entry.service is not None and plan.scales_in(entry, desired, steps):
            await self._scale_in.prepare(entry.service)
        failures = await self._applier.run(key, entry, steps, goal)
        if failures:
            # This stage cannot complete now, so later stages gain nothing by waiting for it.
            rest = [step for step in pending if step not in steps]
            failures += await self._applier.run(key, entry, rest, goal)
            return await self._fail(key, entry, failures)
        entry.problem = None
        if steps:
            return Outcome(stage=later)
        outcome = await self._reconsider_strategy(key, entry, desired)
        if outcome == Outcome() and any(pod.placed_at for pod in entry.pods.values()):
            outcome = Outcome(again_seconds=status.slow_in_seconds(_facts(key, entry, []), clock()))
        entry.manifests = None
        await self._report(key, entry, _pending(entry))
        return outcome

    async def _choose_strategy(self, key: Key, entry: Entry, desired: DesiredState) -> None:
        """Choose the strategy of the rollout that the next write begins, and report it before if pods are replaced."""
        service, pod_spec = entry.service, self._pod_spec(key, entry)
        assert service is not None, "its spec was planned"
        choice = await self._chooser.choose(service, desired.revision, pod_spec)
        if entry.desired is not desired:
            return  # the spec was edited meanwhile
        entry.decide(choice)
        if choice.replace_reason:
            await self._report(key, entry, plan.steps(entry, self._desired(entry)))
            await self._announce_replacement(key, entry)

    async def _reconsider_strategy(self, key: Key, entry: Entry, desired: DesiredState) -> Outcome:
        """Replace old pods in place when a pod beside them is stuck."""
        if not may_be_stuck(entry, desired.revision):
            return Outcome()
        pod_spec = self._pod_spec(key, entry)
        found = await self._chooser.reconsider(entry, desired.revision, pod_spec, clock())
        if entry.desired is not desired:
            return Outcome(stage=Stage.CHILDREN)  # the spec was edited meanwhile
        if found.choice is None:
            return Outcome(again_seconds=found.again_seconds)
        entry.decide(found.choice)
        self._desired(entry)
        await self._announce_replacement(key, entry)
        return Outcome(stage=Stage.CHILDREN)

    async def _announce_replacement(self, key: Key, entry: Entry) -> None:
        """Send the Event of a rollout that replaces pods in place because the operator chose so."""
        text = _announcement(entry)
        if text:
            await self._applier.announce(key, entry.uid, Announcement("Warning", status.REPLACING, text))

    async def _fail(self, key: Key, entry: Entry, failures: list[Failure]) -> Outcome:
        """Report refusals and failures in the status; conflicts and outages are only logged and retried."""
        refused = [failure for failure in failures if isinstance(failure.error, Permanent | ApiFailed)]
        if refused:
            messages = [_message(failure) for failure in refused]
            entry.problem = status.Problem(refused[0].error.reason, "; ".join(messages))
        await self._report(key, entry, _pending(entry))
        if not refused:
            raise failures[0].error
        return Outcome(refused=True)

    def _desired(self, entry: Entry) -> DesiredState:
        if entry.invalid is not None:
            raise entry.invalid
        if entry.desired is None:
            try:
                entry.desired = plan.desired_state(self._manifests(entry))
            except InvalidSpec as error:
                entry.invalid = error
                raise
        return entry.desired

    def _manifests(self, entry: Entry) -> Objects:
        """Return the built objects, which are kept until all of them exist."""
        assert entry.service is not None, "an entry that is present is valid or says why it is not"
        if entry.manifests is None:
            entry.manifests = plan.objects(entry.service, self._settings, entry.choice)
        return entry.manifests

    def _pod_spec(self, key: Key, entry: Entry) -> dict[str, Any]:
        """Return the spec of the desired pods."""
        made: dict[str, Any] = self._manifests(entry)[(DEPLOYMENT, key[1])]["spec"]["template"]["spec"]
        return made

    async def _report(self, key: Key, entry: Entry, pending: list[plan.Step]) -> None:
        """Write the status if it has changed; `pending` are the steps that remain."""
        facts, shortage = _facts(key, entry, pending), ""
        service = entry.service
        if service is not None and containers.gpus(service) and facts.problem is None and not facts.placed:
            shortage = await self._nodes.shortage(service)
            # Events may have come while the nodes were listed.
            facts = _facts(key, entry, _pending(entry), shortage)
        now = clock()
        slow = status.slow_pod(facts, now)
        if slow is not None and facts.problem is None:
            obstacle = await self._pod_events.obstacle(key[0], slow.name, slow.uid)
            facts = _facts(key, entry, _pending(entry), shortage, obstacle)
        new = status.report(facts, entry.status, now)
        await self._applier.write_status(key, entry, new)


def _message(failure: Failure) -> str:
    """Return the error's message, prefixed with the child where it lacks the name, as admission webhooks' messages do."""
    step, text = failure.step, str(failure.error)
    return text if step.name in text else f"{step.kind.name} {step.name}: {text}"


def _pending(entry: Entry) -> list[plan.Step]:
    """Return the steps from the observed state to the desired one, if that is known."""
    return plan.steps(entry, entry.desired) if entry.desired is not None else []


def _facts(
    key: Key,
    entry: Entry,
    pending: list[plan.Step],
    shortage: str = "",
    obstacle: status.Problem | None = None,
) -> status.Facts:
    """Collect the inputs of the status; while the spec is invalid, the last known revision stays the desired one."""
    namespace, name = key
    desired, before = entry.desired, entry.status
    deployment = entry.children.get((DEPLOYMENT, name))
    ours = deployment is not None and deployment.owner == entry.uid
    rollout = entry.rollout if ours else None
    desired_replicas = rollout.desired if rollout else 0
    return status.Facts(
        name=name,
        generation=entry.generation,
        replicas=entry.service.spec.replicas if desired and entry.service else desired_replicas,
        revision=desired.revision if desired else before.update_revision if before else "",
        url=service_builder.url(namespace, name),
        synced=desired is not None and not any(step.kind in (DEPLOYMENT, SERVICE) for step in pending),
        rollout=rollout,
        pods=tuple(pod for pod in entry.pods.values() if ours and not pod.terminating),
        problem=entry.problem,
        shortage=shortage,
        obstacle=obstacle,
        draining=tuple(pod for pod in entry.pods.values() if ours and pod.terminating),
        announcement=_announcement(entry),
    )


def _announcement(entry: Entry) -> str:
    """Describe the rollout to the desired revision if it replaces pods in place."""
    if entry.desired is None or entry.service is None:
        return ""
    policy = entry.service.spec.rollout
    reason = rollout_strategy.replaces(policy, entry.choice, entry.desired.revision)
    return rollout_strategy.announcement(policy, reason, entry.service.spec.replicas) if reason else ""
