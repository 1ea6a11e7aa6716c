"""What must exist for a spec, and the next steps from what does exist. Pure: no I/O, no clock."""

from typing import Literal, NamedTuple

from skiff_operator import policy, workload
from skiff_operator.cache import Child, Entry, Objects, Wanted
from skiff_operator.kinds import BY_NAME, DEPLOYMENT, NEEDED_BY_PODS, Kind, Stage
from skiff_operator.resources import (
    cache_claim,
    deployment,
    disruption_budget,
    service,
    service_account,
    volumes,
)
from skiff_operator.resources.metadata import stamp, stamp_of
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService


class Step(NamedTuple):
    """One write. `uid`: the object that is known to have the name.

    `create`: none is known; `update` and `delete`: it is ours; `verify`: it is not ours, so only a look at it can
    show that it is by now, or that it still is in the way.
    """

    action: Literal["create", "update", "verify", "delete"]
    kind: Kind
    name: str
    uid: str = ""


def objects(wanted: InferenceService, settings: Settings) -> Objects:
    """Everything that must exist, each stamped with its hash.

    Raises:
        InvalidSpec: this operator cannot serve the spec.
    """
    policy.check(wanted, settings)
    built = [service_account.build(wanted)]
    if volumes.needs_claim(wanted):
        built.append(cache_claim.build(wanted))
    built.append(deployment.build(wanted, settings))
    built.append(service.build(wanted))
    if wanted.spec.replicas > 1:
        built.append(disruption_budget.build(wanted))
    for obj in built:
        stamp(obj)
    return {(BY_NAME[obj["kind"]], obj["metadata"]["name"]): obj for obj in built}


def summarize(built: Objects) -> Wanted:
    """Reduce built objects to what is remembered of them."""
    digests = {key: stamp_of(obj) for key, obj in built.items()}
    [made] = [obj for (kind, _), obj in built.items() if kind == DEPLOYMENT]
    return Wanted(digests, deployment.revision(made), workload.used_by(made["spec"]["template"]["spec"]))


def steps(entry: Entry, wanted: Wanted) -> list[Step]:
    """The writes that lead from what exists to what is wanted, in order of creation, then deletions.

    Only objects whose controller is this very InferenceService are changed or deleted. What pods need is deleted
    last: when the wanted revision has taken over, and no pod of any revision uses it.
    """
    result = []
    for (kind, name), digest in wanted.digests.items():
        child = entry.children.get((kind, name))
        if child is None:
            result.append(Step("create", kind, name))
        elif child.owner != entry.uid:
            result.append(Step("verify", kind, name, child.uid))
        elif not _holds(child, digest):
            result.append(Step("update", kind, name, child.uid))
    for (kind, name), child in sorted(entry.children.items(), key=_kind_and_name):
        if (kind, name) in wanted.digests or child.owner != entry.uid:
            continue
        if kind not in NEEDED_BY_PODS or _is_unused(entry, wanted, (kind, name)):
            result.append(Step("delete", kind, name, child.uid))
    return result


def is_blocked(entry: Entry, wanted: Wanted, step: Step) -> bool:
    """Return True for a Deployment whose ServiceAccount or claim is missing or another's: its pods must not use that."""
    if step.kind != DEPLOYMENT:
        return False
    needs = [entry.children.get(key) for key in wanted.digests if key[0] in NEEDED_BY_PODS]
    return any(child is None or child.owner != entry.uid for child in needs)


def first_stage(pending: list[Step]) -> tuple[list[Step], Stage]:
    """The steps to take now, and the stage of what remains after them."""
    if not pending:
        return [], Stage.STATUS
    now = min(step.kind.stage for step in pending)
    later = [step.kind.stage for step in pending if step.kind.stage != now]
    return [step for step in pending if step.kind.stage == now], min(later, default=Stage.STATUS)


def _is_unused(entry: Entry, wanted: Wanted, key: tuple[Kind, str]) -> bool:
    if key in wanted.used or any(key in pod.used for pod in entry.pods.values()):
        return False
    rolled_out = entry.rollout is not None and entry.rollout.complete
    made = [(child, entry.children.get(child)) for child in wanted.digests if child[0] == DEPLOYMENT]
    return rolled_out and all(
        live is not None and live.owner == entry.uid and _holds(live, wanted.digests[child])
        for child, live in made
    )


def _holds(child: Child, digest: str) -> bool:
    return child.digest == digest and child.intact


def _kind_and_name(item: tuple[tuple[Kind, str], Child]) -> tuple[str, str]:
    return item[0][0].name, item[0][1]
