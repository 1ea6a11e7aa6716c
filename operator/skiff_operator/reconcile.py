"""One idempotent reconcile of an InferenceService: observe, plan, apply, report."""

from collections.abc import Callable
from typing import Any, NamedTuple

from skiff_operator import canary, plan, revisions, rollback, rollout_strategy, status
from skiff_operator.apply import Applier, Failure, Goal, clock
from skiff_operator.cache import DesiredState, Entry, Objects
from skiff_operator.errors import ApiConflict, ApiFailed, ApiNotFound, InvalidSpec, Permanent
from skiff_operator.events import Announcement
from skiff_operator.kinds import ADDONS, CONTROLLER_REVISION, DEPLOYMENT, SERVICE, Stage
from skiff_operator.model_caches.index import Index
from skiff_operator.nodes import Nodes
from skiff_operator.observe import Observer
from skiff_operator.pod_events import PodEvents
from skiff_operator.resources import containers, controller_revision, deployment, pod
from skiff_operator.resources import service as service_builder
from skiff_operator.revisions import Target
from skiff_operator.rollout_analysis import Verdict
from skiff_operator.rollout_analyzer import RolloutAnalyzer
from skiff_operator.scale_in import ScaleIn
from skiff_operator.settings import Settings
from skiff_operator.strategy_chooser import StrategyChooser, may_be_stuck
from skiff_operator.upgrade_waves import UpgradeWaves
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
        analyzer: RolloutAnalyzer,
        settings: Settings,
        *,
        model_caches: Index | None = None,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read through `observer`, `nodes` and `pod_events`, write through `applier`.

        `chooser` chooses rollout strategies, `scale_in` the pods that a scale-in takes, and `analyzer` compares revisions;
        `model_caches` are None if they are off. `is_complete`: whether the cache has the objects of all namespaces.
        """
        self._model_caches = model_caches
        self._observer = observer
        self._applier = applier
        self._nodes = nodes
        self._pod_events = pod_events
        self._chooser = chooser
        self._scale_in = scale_in
        self._analyzer = analyzer
        self._settings = settings
        self._waves = UpgradeWaves(observer.cache, settings, is_complete=is_complete)

    async def reconcile(self, key: Key) -> Outcome:
        """Take the next steps for `key`.

        Raises:
            Retryable: try again later. What the API server refuses is reported in the status instead.
        """
        entry = self._observer.cache.get(key)
        if entry is not None:
            await self._delete_leftovers(key, entry)
        if entry is None or not entry.present or entry.deleting:
            self._analyzer.forget(key)
            return Outcome()
        self._choose_model_cache(entry)
        try:
            desired = self._desired(key, entry)
            if desired.target is not None and desired.target.renew:
                await self._renew(key, entry, desired.target)
                return Outcome(stage=Stage.CHILDREN)
            worse = self._analyzer.analyze(key, entry, clock())
            pending = plan.steps(entry, desired)
            if pending and self._chooser.is_due(entry, desired.deployed):
                await self._choose_strategy(key, entry, desired)
                return await self.reconcile(key)
            goal = Goal(entry.uid, desired, await self._objects(key, entry, desired, pending))
        except InvalidSpec as error:
            entry.problem = status.Problem(error.reason, str(error))
            await self._report(key, entry, self._pending(key, entry))
            return Outcome()
        steps, later = plan.first_stage(pending)
        if entry.service is not None and plan.scales_in(entry, desired, steps):
            await self._scale_in.prepare(entry.service)
        if plan.begins_rollout(entry, desired, steps):
            await self._analyzer.begin(key, entry)
        if entry.desired is not desired:
            return Outcome(stage=Stage.CHILDREN)  # the spec was edited meanwhile
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
        await self._report(key, entry, self._pending(key, entry))
        if outcome.stage is not None:
            return outcome
        if entry.analyzed_baseline:
            seconds = self._settings.rollout_metrics_seconds  # the pods are read again
            outcome = Outcome(again_seconds=min(outcome.again_seconds or seconds, seconds))
        outcome = await self._roll_back(key, entry, desired, outcome, worse)
        return outcome if outcome.stage is not None else await self._promote(key, entry, desired, outcome)

    async def _delete_leftovers(self, key: Key, entry: Entry) -> None:
        """Delete the children of earlier InferenceServices of this name that the garbage collector has overlooked."""
        overdue = [each for each in entry.leftovers() if each[2].uid in self._observer.overdue]
        if overdue:
            await self._applier.delete_leftovers(key, overdue)

    async def _renew(self, key: Key, entry: Entry, target: Target) -> None:
        """Bring an existing revision into force again."""
        assert entry.service is not None, "its revision was chosen"
        uid = entry.children[(CONTROLLER_REVISION, target.name)].uid
        patch = revisions.renewal(entry.service, target, entry.own_revisions())
        await self._applier.change_revision(key, target.name, uid, patch)

    async def _roll_back(
        self, key: Key, entry: Entry, desired: DesiredState, otherwise: Outcome, worse: Verdict | None
    ) -> Outcome:
        """Mark the revision in force as failed when it must be rolled back; the next reconcile chooses another one."""
        target = desired.target
        reason = rollback.reason(entry, target, clock(), self._settings.rollback_after_seconds, worse)
        child = entry.children.get((CONTROLLER_REVISION, target.name)) if target is not None else None
        if not reason or target is None or child is None:
            return otherwise
        patch = {"metadata": {"annotations": {revisions.ANNOTATION_FAILED: reason}}}
        await self._applier.change_revision(key, target.name, child.uid, patch)
        return Outcome(stage=Stage.CHILDREN)

    async def _promote(self, key: Key, entry: Entry, desired: DesiredState, otherwise: Outcome) -> Outcome:
        """Mark a canary as promoted when its requests have proved it; the next reconcile lets its rollout go on."""
        target, written = desired.target, entry.status
        if not desired.held or target is None or written is None or written.canary is None:
            return otherwise
        if entry.service is None or self._analyzer.suspects(key):
            return otherwise
        started_at, now = written.canary.started_at, clock()
        reason = canary.promotion(entry.service.spec.rollout, entry.last_analysis, started_at, now)
        child = entry.children.get((CONTROLLER_REVISION, target.name))
        if not reason or child is None:
            return otherwise
        patch = {"metadata": {"annotations": {revisions.ANNOTATION_PROMOTED: reason}}}
        await self._applier.change_revision(key, target.name, child.uid, patch)
        text = f"canary revision {target.revision} is promoted: {reason}"
        await self._applier.announce(key, entry.uid, Announcement("Normal", status.PROMOTED, text))
        return Outcome(stage=Stage.CHILDREN)

    async def _choose_strategy(self, key: Key, entry: Entry, desired: DesiredState) -> None:
        """Choose the strategy of the rollout that the next write begins, and report it before if pods are replaced."""
        service, pod_spec = entry.service, self._pod_spec(key, entry)
        assert service is not None, "its spec was planned"
        choice = await self._chooser.choose(service, desired.deployed, pod_spec)
        if entry.desired is not desired:
            return  # the spec was edited meanwhile
        entry.decide(choice)
        if choice.replace_reason:
            await self._report(key, entry, plan.steps(entry, self._desired(key, entry)))
            await self._announce_replacement(key, entry)

    async def _reconsider_strategy(self, key: Key, entry: Entry, desired: DesiredState) -> Outcome:
        """Replace old pods in place when a pod beside them is stuck."""
        if not may_be_stuck(entry, desired.deployed):
            return Outcome()
        pod_spec = self._pod_spec(key, entry)
        found = await self._chooser.reconsider(entry, desired.deployed, pod_spec, clock())
        if entry.desired is not desired:
            return Outcome(stage=Stage.CHILDREN)  # the spec was edited meanwhile
        if found.choice is None:
            return Outcome(again_seconds=found.again_seconds)
        entry.decide(found.choice)
        self._desired(key, entry)
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
        await self._report(key, entry, self._pending(key, entry))
        if not refused:
            raise failures[0].error
        return Outcome(refused=True)

    def _choose_model_cache(self, entry: Entry) -> None:
        """Choose the ModelCache of a service. Raises `Retryable` while they are not listed yet."""
        if self._model_caches is None or entry.service is None:
            return
        chosen = self._model_caches.choose(entry.service)
        if chosen != entry.service.model_cache:
            entry.use_model_cache(chosen)

    def _desired(self, key: Key, entry: Entry) -> DesiredState:
        """Return the desired state, with the revision in force; raise `InvalidSpec`."""
        if entry.invalid is not None:
            raise entry.invalid
        adopt = self._adopts(key, entry)
        if entry.desired is None or adopt:
            try:
                entry.desired = self._choose(key, entry, adopt=adopt)
                if self._adopts(key, entry):
                    entry.desired = self._choose(key, entry, adopt=True)
            except InvalidSpec as error:
                entry.invalid = error
                raise
        return entry.desired

    def _pending(self, key: Key, entry: Entry) -> list[plan.Step]:
        """Return the steps from the observed state to the desired one, if that is known."""
        try:
            return plan.steps(entry, self._desired(key, entry))
        except InvalidSpec:
            return []

    def _adopts(self, key: Key, entry: Entry) -> bool:
        """Return whether a wave lets the service adopt the template that this operator builds."""
        target = None if entry.desired is None else entry.desired.target
        return target is not None and bool(target.outdated) and self._waves.admit(key)

    def _choose(self, key: Key, entry: Entry, *, adopt: bool) -> DesiredState:
        built = self._manifests(entry)
        assert entry.service is not None, "it was built"
        revision = deployment.revision(plan.built_deployment(built))
        target = revisions.choose(entry.service, revision, entry.observed(key[1]), adopt=adopt)
        current = entry.status.current_revision if entry.status is not None else ""
        held = revisions.is_canary(entry.service, target, entry.own_revisions(), current)
        rollout = entry.service.spec.rollout
        return plan.desired_state(built, target, rollout=rollout, choice=entry.choice, held=held)

    async def _objects(
        self, key: Key, entry: Entry, desired: DesiredState, pending: list[plan.Step]
    ) -> Objects:
        """Return the objects that the pending steps write, the Deployment with the template of the revision in force."""
        target = desired.target
        if not pending or target is None:
            return {}
        built = self._manifests(entry)
        written = {step.kind for step in pending if step.action != "delete"}
        if not written & {CONTROLLER_REVISION, DEPLOYMENT}:
            return built
        service = (
            entry.service
        )  # a deletion that is observed while the template is read takes it from the entry
        assert service is not None, "it was built"
        made = plan.built_deployment(built)
        template = await self._template(key, target, made["spec"]["template"])
        if target.source != "built":
            pod.check_recorded(template, service, self._settings)
        made = deployment.with_template(made, template, target.spec_hash)
        made = deployment.with_strategy(made, service.spec.rollout, entry.choice, held=desired.held)
        objects = {**built, (DEPLOYMENT, key[1]): made}
        if not entry.owns(CONTROLLER_REVISION, target.name):
            last = revisions.newest(entry.own_revisions())
            number = 1 if last is None else last.number + 1
            body = controller_revision.build(service, target, template, number=number)
            objects[(CONTROLLER_REVISION, target.name)] = body
        return objects

    async def _template(self, key: Key, target: Target, built: dict[str, Any]) -> dict[str, Any]:
        """Return the template of the revision in force; one that this operator would not build is read."""
        if target.source == "built":
            return built
        if target.source == "live":
            template: dict[str, Any] = (await self._applier.read(key, DEPLOYMENT, key[1]))["spec"]["template"]
            template["metadata"].pop("creationTimestamp", None)  # null in every stored template
            return template
        template = (await self._applier.read(key, CONTROLLER_REVISION, target.stored))["data"]["template"]
        return revisions.restarted(template, target) if target.restart else template

    def _manifests(self, entry: Entry) -> Objects:
        """Return the built objects, which are kept until all of them exist.

        Raises:
            ApiConflict: the InferenceService was deleted while this reconcile waited for the API server.
        """
        if entry.service is None:
            raise ApiConflict("the InferenceService was deleted meanwhile")
        if entry.manifests is None:
            entry.manifests = plan.objects(entry.service, self._settings)
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
            facts = _facts(key, entry, self._pending(key, entry), shortage)
        now = clock()
        slow = status.slow_pod(facts, now)
        if slow is not None and facts.problem is None:
            obstacle = await self._pod_events.obstacle(key[0], slow.name, slow.uid)
            facts = _facts(key, entry, self._pending(key, entry), shortage, obstacle)
        new = status.report(facts, entry.status, now)
        await self._applier.write_status(key, entry, new)


def _message(failure: Failure) -> str:
    """Return the error's message, prefixed with the child where it lacks the name, as admission webhooks' messages do."""
    step, text = failure.step, str(failure.error)
    addon = ADDONS.get(step.kind)
    if addon is not None and isinstance(failure.error, ApiNotFound):
        text = f"{addon.name} is not installed; install it and restart the operator, or {addon.advice}"
    return text if step.name in text else f"{step.kind.name} {step.name}: {text}"


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
    target = desired.target if desired else None
    failed = rollback.problem(name, target) if target and target.failed else None
    return status.Facts(
        name=name,
        generation=entry.generation,
        replicas=entry.service.spec.replicas if desired and entry.service else desired_replicas,
        revision=desired.revision if desired else before.update_revision if before else "",
        url=service_builder.url(namespace, name),
        synced=desired is not None
        and failed is None
        and not any(step.kind in (DEPLOYMENT, SERVICE) for step in pending),
        rollout=rollout,
        pods=tuple(pod for pod in entry.pods.values() if ours and not pod.terminating),
        problem=entry.problem or failed,
        shortage=shortage,
        outdated=target.outdated if target else "",
        paused=entry.service is not None and entry.service.spec.rollout.paused,
        obstacle=obstacle,
        draining=tuple(pod for pod in entry.pods.values() if ours and pod.terminating),
        announcement=_announcement(entry),
        restored=target.deployed if target and target.failed else "",
        analysis=entry.last_analysis,
        scaling=entry.last_scaling,
        adapters=entry.last_adapters,
        canary=entry.service.spec.rollout.canary if desired and desired.held and entry.service else None,
    )


def _announcement(entry: Entry) -> str:
    """Describe the rollout to the desired revision if it replaces pods in place."""
    if entry.desired is None or entry.service is None:
        return ""
    policy = entry.service.spec.rollout
    reason = rollout_strategy.replaces(policy, entry.choice, entry.desired.deployed)
    return rollout_strategy.announcement(policy, reason, entry.service.spec.replicas) if reason else ""
