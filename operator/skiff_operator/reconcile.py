"""One idempotent reconcile of an InferenceService: observe, plan, apply, report."""

from typing import NamedTuple

from skiff_operator import plan, status
from skiff_operator.apply import Applier, Failure, Goal, clock
from skiff_operator.cache import DesiredState, Entry, Objects
from skiff_operator.errors import ApiFailed, InvalidSpec, Permanent
from skiff_operator.kinds import DEPLOYMENT, SERVICE, Stage
from skiff_operator.model_caches.index import Index
from skiff_operator.nodes import Nodes
from skiff_operator.observe import Observer
from skiff_operator.resources import containers
from skiff_operator.resources import service as service_builder
from skiff_operator.settings import Settings
from skiff_operator.workqueue import Key


class Outcome(NamedTuple):
    """Result of one reconcile: `stage` is set when steps remain; `refused` when only a later retry may help."""

    stage: Stage | None = None
    refused: bool = False


class Reconciler:
    """Brings the cluster closer to one spec, the most urgent stage at a time."""

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        nodes: Nodes,
        settings: Settings,
        *,
        model_caches: Index | None = None,
    ) -> None:
        """Read through `observer` and `nodes`, write through `applier`; `model_caches` are None if they are off."""
        self._model_caches = model_caches
        self._observer = observer
        self._applier = applier
        self._nodes = nodes
        self._settings = settings

    async def reconcile(self, key: Key) -> Outcome:
        """Take the next steps for `key`.

        Raises:
            Retryable: try again later. What the API server refuses is reported in the status instead.
        """
        entry = self._observer.cache.get(key)
        if entry is None or not entry.present or entry.deleting:
            return Outcome()
        self._choose_model_cache(entry)
        try:
            desired = self._desired(entry)
            pending = plan.steps(entry, desired)
            goal = Goal(entry.uid, desired, self._manifests(entry) if pending else {})
        except InvalidSpec as error:
            entry.problem = status.Problem(error.reason, str(error))
            await self._report(key, entry, _pending(entry))
            return Outcome()
        steps, later = plan.first_stage(pending)
        failures = await self._applier.run(key, entry, steps, goal)
        if failures:
            # This stage cannot complete now, so later stages gain nothing by waiting for it.
            rest = [step for step in pending if step not in steps]
            failures += await self._applier.run(key, entry, rest, goal)
            return await self._fail(key, entry, failures)
        entry.problem = None
        if steps:
            return Outcome(stage=later)
        entry.manifests = None
        await self._report(key, entry, pending)
        return Outcome()

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

    def _choose_model_cache(self, entry: Entry) -> None:
        """Choose the ModelCache of a service. Raises `Retryable` while they are not listed yet."""
        if self._model_caches is None or entry.service is None:
            return
        chosen = self._model_caches.choose(entry.service)
        if chosen != entry.service.model_cache:
            entry.use_model_cache(chosen)

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
            entry.manifests = plan.objects(entry.service, self._settings)
        return entry.manifests

    async def _report(self, key: Key, entry: Entry, pending: list[plan.Step]) -> None:
        """Write the status if it has changed; `pending` are the steps that remain."""
        facts = _facts(key, entry, pending)
        service = entry.service
        if service is not None and containers.gpus(service) and facts.problem is None and not facts.placed:
            shortage = await self._nodes.shortage(service)
            # Events may have come while the nodes were listed.
            facts = _facts(key, entry, _pending(entry), shortage)
        new = status.report(facts, entry.status, clock())
        await self._applier.write_status(key, entry, new)


def _message(failure: Failure) -> str:
    """Return the error's message, prefixed with the child where it lacks the name, as admission webhooks' messages do."""
    step, text = failure.step, str(failure.error)
    return text if step.name in text else f"{step.kind.name} {step.name}: {text}"


def _pending(entry: Entry) -> list[plan.Step]:
    """Return the steps from the observed state to the desired one, if that is known."""
    return plan.steps(entry, entry.desired) if entry.desired is not None else []


def _facts(key: Key, entry: Entry, pending: list[plan.Step], shortage: str = "") -> status.Facts:
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
    )
