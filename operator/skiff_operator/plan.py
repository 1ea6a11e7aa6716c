"""What must exist for a spec, and the next steps from what does exist. Pure: no I/O, no clock."""

from typing import Literal, NamedTuple

from skiff_operator import policy
from skiff_operator.cache import Child, Entry, Objects, Wanted
from skiff_operator.kinds import BY_NAME, DEPLOYMENT, Kind, Stage
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
    """One write. `ours`: the object is known to be ours, so its fields may be taken back by force."""

    action: Literal["apply", "delete"]
    kind: Kind
    name: str
    ours: bool = True
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
    """What is remembered of built objects: their hashes and the pods' revision."""
    revisions = [deployment.revision(obj) for (kind, _), obj in built.items() if kind == DEPLOYMENT]
    return Wanted({key: stamp_of(obj) for key, obj in built.items()}, revisions[0])


def steps(entry: Entry, wanted: Wanted) -> list[Step]:
    """The writes that lead from what exists to what is wanted: applies in order of creation, then deletions.

    Only objects whose controller is this very InferenceService are deleted.
    """
    result = []
    for (kind, name), digest in wanted.digests.items():
        child = entry.children.get((kind, name))
        if child is None or not _holds(child, digest):
            ours = child is not None and child.owner == entry.uid
            result.append(Step("apply", kind, name, ours=ours))
    for (kind, name), child in sorted(entry.children.items(), key=_kind_and_name):
        if (kind, name) not in wanted.digests and child.owner == entry.uid:
            result.append(Step("delete", kind, name, uid=child.uid))
    return result


def first_stage(pending: list[Step]) -> tuple[list[Step], Stage]:
    """The steps to take now, and the stage of what remains after them."""
    if not pending:
        return [], Stage.STATUS
    now = min(step.kind.stage for step in pending)
    later = [step.kind.stage for step in pending if step.kind.stage != now]
    return [step for step in pending if step.kind.stage == now], min(later, default=Stage.STATUS)


def _holds(child: Child, digest: str) -> bool:
    return child.digest == digest and child.intact


def _kind_and_name(item: tuple[tuple[Kind, str], Child]) -> tuple[str, str]:
    return item[0][0].name, item[0][1]
