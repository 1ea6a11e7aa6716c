"""The planner: the desired objects of a spec, and the steps from the observed state to it. Pure: no I/O, no clock."""

from typing import Literal, NamedTuple

from skiff_operator import policy, workload
from skiff_operator.cache import Child, DesiredState, Entry, Objects
from skiff_operator.kinds import BY_NAME, DEPLOYMENT, NEEDED_BY_PODS, Kind, Stage
from skiff_operator.resources import (
    cache_claim,
    deployment,
    disruption_budget,
    model_cache_claim,
    service,
    service_account,
    volumes,
)
from skiff_operator.resources.metadata import digest_annotation, stamp
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService


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
    if inference_service.model_cache:
        built.append(model_cache_claim.build(inference_service, inference_service.model_cache))
    built.append(deployment.build(inference_service, settings))
    built.append(service.build(inference_service))
    if inference_service.spec.replicas > 1:
        built.append(disruption_budget.build(inference_service))
    for obj in built:
        stamp(obj)
    return {(BY_NAME[obj["kind"]], obj["metadata"]["name"]): obj for obj in built}


def desired_state(built: Objects) -> DesiredState:
    """Reduce built objects to the part that the cache keeps."""
    digests = {key: digest_annotation(obj) for key, obj in built.items()}
    [made] = [obj for (kind, _), obj in built.items() if kind == DEPLOYMENT]
    return DesiredState(
        digests, deployment.revision(made), workload.used_by(made["spec"]["template"]["spec"])
    )


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
        elif not _holds(child, digest):
            result.append(Step("update", kind, name, child.uid))
    surplus = [item for item in entry.children.items() if item[0] not in desired.digests]
    for (kind, name), child in sorted(surplus, key=_kind_and_name):
        if child.owner != entry.uid:
            continue
        if kind not in NEEDED_BY_PODS or _is_unused(entry, desired, (kind, name)):
            result.append(Step("delete", kind, name, child.uid))
    return result


def is_blocked(entry: Entry, desired: DesiredState, step: Step) -> bool:
    """Return True for a Deployment whose ServiceAccount or claim is missing or not ours: its pods must not use another's."""
    if step.kind != DEPLOYMENT:
        return False
    needs = [entry.children.get(key) for key in desired.digests if key[0] in NEEDED_BY_PODS]
    return any(child is None or child.owner != entry.uid for child in needs)


def first_stage(pending: list[Step]) -> tuple[list[Step], Stage]:
    """Return the steps of the most urgent stage, and the next stage after them."""
    if not pending:
        return [], Stage.STATUS
    now = min(step.kind.stage for step in pending)
    later = [step.kind.stage for step in pending if step.kind.stage != now]
    return [step for step in pending if step.kind.stage == now], min(later, default=Stage.STATUS)


def _is_unused(entry: Entry, desired: DesiredState, key: tuple[Kind, str]) -> bool:
    if key in desired.used or any(key in pod.used for pod in entry.pods.values()):
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
