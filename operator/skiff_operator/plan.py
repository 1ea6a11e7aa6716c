"""The planner: the desired objects of a spec, and the steps from the observed state to it. Pure: no I/O, no clock."""

from typing import Any, Literal, NamedTuple

from skiff_operator import policy, revisions, workload
from skiff_operator.cache import Child, DesiredState, Entry, Objects
from skiff_operator.kinds import (
    BY_NAME,
    CONTROLLER_REVISION,
    CREATED_BEFORE_PODS,
    DEPLOYMENT,
    NEEDED_BY_PODS,
    Kind,
    Stage,
)
from skiff_operator.resources import (
    cache_claim,
    deployment,
    disruption_budget,
    http_route,
    inference_pool,
    model_cache_claim,
    network_policy,
    pod_autoscaler,
    service,
    service_account,
    volumes,
)
from skiff_operator.resources.metadata import digest_annotation, stamp
from skiff_operator.revisions import Target
from skiff_operator.rollout_strategy import Choice
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService, RolloutPolicy


class Step(NamedTuple):
    """One write. `uid`: the known object of that name.

    `create`: none is known; `update` and `delete`: it is ours; `verify`: it was not ours when last observed, so it
    must be read again to find out whether it still blocks the name.
    """

    action: Literal["create", "update", "verify", "delete"]
    kind: Kind
    name: str
    uid: str = ""


def objects(inference_service: InferenceService, settings: Settings) -> Objects:
    """Build every object that must exist, each annotated with its desired-state hash.

    Raises:
        InvalidSpec: this operator cannot serve the spec.
    """
    policy.check(inference_service, settings)
    built = [service_account.build(inference_service)]
    if volumes.needs_claim(inference_service):
        built.append(cache_claim.build(inference_service))
    mounted = inference_service.mounted_cache
    if mounted.name and not mounted.claim:
        built.append(model_cache_claim.build(inference_service, mounted.name))
    if inference_service.spec.network_policy is not None:
        built.append(network_policy.build(inference_service, settings))
    made = deployment.build(inference_service, settings)
    deployment.record_spec(made, revisions.spec_hash(inference_service))
    built.append(made)
    built.append(service.build(inference_service))
    if inference_service.spec.most_replicas > 1:
        built.append(disruption_budget.build(inference_service))
    autoscaling = inference_service.spec.autoscaling
    if autoscaling is not None and autoscaling.engine != "Builtin":
        built.append(pod_autoscaler.build(inference_service, autoscaling, settings))
    pool = inference_service.spec.pool
    if pool is not None:
        built.append(inference_pool.build(inference_service, pool))
        if pool.http_route is not None:
            built.append(http_route.build(inference_service, pool.http_route))
    for obj in built:
        (deployment.stamp if obj is made else stamp)(obj)
    return {(BY_NAME[obj["kind"]], obj["metadata"]["name"]): obj for obj in built}


def desired_state(
    built: Objects,
    target: Target | None = None,
    *,
    rollout: RolloutPolicy | None = None,
    choice: Choice | None = None,
    held: bool = False,
) -> DesiredState:
    """Reduce built objects to the part that the cache keeps.

    `target`: the revision in force, else the one just built; `choice`: the strategy that was chosen under `rollout`;
    `held`: it is a canary.
    """
    made = built_deployment(built)
    used = workload.used_by(made["spec"]["template"]["spec"])
    if target is None:
        digests = {key: digest_annotation(obj) for key, obj in built.items()}
        return DesiredState(digests, deployment.revision(made), used)
    digests = {}
    for key, obj in built.items():
        if obj is made:
            digests[(CONTROLLER_REVISION, target.name)] = ""  # its data never changes
            obj = deployment.with_template(made, deployment.placeholder(target.deployed), target.spec_hash)
            obj = deployment.with_strategy(obj, rollout or RolloutPolicy(), choice, held=held)
        digests[key] = digest_annotation(obj)
    used = used if target.used is None else target.used
    return DesiredState(digests, target.revision, used, target, held)


def built_deployment(built: Objects) -> dict[str, Any]:
    """Return the Deployment among built objects."""
    [made] = [obj for (kind, _), obj in built.items() if kind == DEPLOYMENT]
    return made


def steps(entry: Entry, desired: DesiredState) -> list[Step]:
    """Return the writes from the observed to the desired state: creations and updates in order, then deletions.

    Only objects whose controller is this InferenceService are changed or deleted. Objects that pods need are deleted
    last: after the desired revision has rolled out and no pod of any revision uses them.
    """
    result = []
    for (kind, name), digest in desired.digests.items():
        child = entry.children.get((kind, name))
        if child is None:
            result.append(Step("create", kind, name))
        elif child.owner != entry.uid:
            result.append(Step("verify", kind, name, child.uid))
        elif kind != CONTROLLER_REVISION and not _holds(child, digest):
            result.append(Step("update", kind, name, child.uid))
    surplus = [item for item in entry.children.items() if item[0] not in desired.digests]
    for (kind, name), child in sorted(surplus, key=_kind_and_name):
        if child.owner != entry.uid or kind == CONTROLLER_REVISION:
            continue
        if kind not in NEEDED_BY_PODS or _is_unused(entry, desired, (kind, name)):
            result.append(Step("delete", kind, name, child.uid))
    return [*result, *_history_steps(entry, desired)]


def is_blocked(entry: Entry, desired: DesiredState, step: Step) -> bool:
    """Return True for a Deployment whose ServiceAccount, claim, policy or revision is missing or not ours.

    Its pods must neither use another's nor be unprotected, and a template that is not recorded would be lost with the
    next one.
    """
    if step.kind != DEPLOYMENT:
        return False
    needs = [entry.children.get(key) for key in desired.digests if key[0] in CREATED_BEFORE_PODS]
    return any(child is None or child.owner != entry.uid for child in needs)


def scales_in(entry: Entry, desired: DesiredState, steps: list[Step]) -> bool:
    """Return whether one of `steps` leaves the Deployment fewer pods of the same revision, and some."""
    if entry.service is None or entry.rollout is None or entry.rollout.revision != desired.deployed:
        return False
    fewer = 0 < entry.service.spec.replicas < entry.rollout.desired
    return fewer and any((step.action, step.kind) == ("update", DEPLOYMENT) for step in steps)


def begins_rollout(entry: Entry, desired: DesiredState, steps: list[Step]) -> bool:
    """Return whether one of `steps` gives the Deployment another pod template."""
    if entry.rollout is None or entry.rollout.revision == desired.deployed:
        return False
    return any((step.action, step.kind) == ("update", DEPLOYMENT) for step in steps)


def first_stage(pending: list[Step]) -> tuple[list[Step], Stage]:
    """Return the steps of the most urgent stage, and the next stage after them."""
    if not pending:
        return [], Stage.STATUS
    now = min(step.kind.stage for step in pending)
    later = [step.kind.stage for step in pending if step.kind.stage != now]
    return [step for step in pending if step.kind.stage == now], min(later, default=Stage.STATUS)


def _history_steps(entry: Entry, desired: DesiredState) -> list[Step]:
    """Return the deletions of revisions beyond the history limit. One that has pods, or may get them back, is kept."""
    if desired.target is None or entry.service is None:
        return []
    in_use = {entry.analyzed_baseline, *(pod.revision for pod in entry.pods.values())}
    if entry.status is not None:
        in_use.add(entry.status.current_revision)
    limit = entry.service.spec.rollout.revision_history_limit
    old = revisions.surplus(desired.target, entry.own_revisions(), in_use, limit)
    uids = [entry.children[(CONTROLLER_REVISION, each.name)].uid for each in old]
    return [Step("delete", CONTROLLER_REVISION, each.name, uid) for each, uid in zip(old, uids, strict=True)]


def _is_unused(entry: Entry, desired: DesiredState, key: tuple[Kind, str]) -> bool:
    used = [desired.used, *(pod.used for pod in entry.pods.values())]
    used += [each.used for each in entry.own_revisions() if each.revision == entry.analyzed_baseline]
    if any(key in each for each in used):
        return False
    rolled_out = entry.rollout is not None and entry.rollout.complete
    made = [(child, entry.children.get(child)) for child in desired.digests if child[0] == DEPLOYMENT]
    return rolled_out and all(
        live is not None and live.owner == entry.uid and _holds(live, desired.digests[child])
        for child, live in made
    )


def _holds(child: Child, digest: str) -> bool:
    return child.digest == digest and child.in_sync


def _kind_and_name(item: tuple[tuple[Kind, str], Child]) -> tuple[str, str]:
    return item[0][0].name, item[0][1]
