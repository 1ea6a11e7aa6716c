"""Revisions: the pod templates that an InferenceService has had, and the choice of the one that its pods get. Pure.

Each revision is a ControllerRevision, created before the Deployment gets its template. The newest revision of the
present spec is in force, so another operator, which would build another template from the same spec, changes no pod.
A template is built anew when the spec has no revision yet, on request (`upgraded_at`), or when a wave admits it.
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from skiff_operator import workload
from skiff_operator.kinds import Kind
from skiff_operator.resources.metadata import ANNOTATION_SPEC_HASH, LABEL_REVISION, digest
from skiff_operator.spec import ANNOTATION_RESTARTED_AT, ANNOTATION_UPGRADED_AT, InferenceService, explicit
from skiff_runtime import contract

ANNOTATION_BASE: Final = f"{contract.API_GROUP}/base-revision"
ANNOTATION_CAUSE: Final = "kubernetes.io/change-cause"
ANNOTATION_FAILED: Final = f"{contract.API_GROUP}/failed"
ANNOTATION_PROMOTED: Final = f"{contract.API_GROUP}/promoted"
"""On a ControllerRevision whose canary was promoted: the reason."""
ANNOTATION_POD_RESTARTED_AT: Final = "kubectl.kubernetes.io/restartedAt"
"""The annotation of pods by which `kubectl rollout restart` changes a template."""

SPEC_CHANGED: Final = "spec changed"
ADOPTED: Final = "adopted from the Deployment"
RESTARTED: Final = "restarted"
UPGRADED: Final = "upgraded"
WAVE: Final = "upgraded in a wave"

NOT_OF_PODS: Final = ("replicas", "autoscaling", "rollout", "inferencePool", "adapters")
"""Fields of the spec that change no pod; a return to an earlier revision keeps them, too."""


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """One ControllerRevision, without the spec and the template in its data.

    `number` orders the revisions by their last use; `revision` is the label of its pods; `base` is the label of its
    template without the annotation of a restart. `failed` is the reason why it was rolled back, and `promoted` the reason
    why it is no canary any more, or empty.
    `restarted_at` and `upgraded_at` are the requests that the InferenceService had when it came into force.
    """

    name: str
    number: int
    revision: str
    base: str
    spec_hash: str
    operator_version: str
    cause: str = ""
    failed: str = ""
    promoted: str = ""
    restarted_at: str = ""
    upgraded_at: str = ""
    used: frozenset[tuple[Kind, str]] = frozenset()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The revision in force. `name` is its ControllerRevision, and `revision` the label of its pods.

    `deployed` is the label of the template that the Deployment gets, and `spec_hash` the hash of the spec behind it:
    of another revision after a rollback, whose reason is `failed`. `source` says where that template is: `built` from
    the spec, `stored` in the ControllerRevision of the name `stored`, or `live` in the Deployment. `restart` is the
    time of a restart that it must be annotated with. `outdated` is the version of the operator that built it, if this
    operator would build another one. `renew`: an existing revision comes into force again.
    """

    name: str
    revision: str
    deployed: str
    base: str
    spec_hash: str
    source: Literal["built", "stored", "live"]
    stored: str = ""
    restart: str = ""
    cause: str = ""
    outdated: str = ""
    failed: str = ""
    renew: bool = False
    used: frozenset[tuple[Kind, str]] | None = None


class Observed(NamedTuple):
    """The inputs of a choice: revisions of this InferenceService, and its Deployment's template if that is ours.

    `settled_revision` is the revision of the last status, if that status is about the present generation.
    `current_revision` is the last one that was Ready, and `baseline_revision` the one before it, with which it is compared.
    """

    revisions: tuple[Revision, ...] = ()
    live_revision: str = ""
    live_spec_hash: str = ""
    settled_revision: str = ""
    current_revision: str = ""
    baseline_revision: str = ""


def spec_hash(service: InferenceService) -> str:
    """Return the hash of everything in the spec that pods depend on."""
    return digest(pod_spec(service))


def pod_spec(service: InferenceService) -> dict[str, Any]:
    """Return the part of the spec that pods depend on.

    Fields with their default value are left out: a later version adds fields, and that must not change the hash.
    """
    return explicit(service.spec, skip=NOT_OF_PODS)


def object_name(service: str, spec_digest: str, revision: str) -> str:
    """Return the name of a ControllerRevision: one for each pair of a spec and a template."""
    return f"{service}-{digest([spec_digest, revision])[:10]}"


def read(obj: dict[str, Any]) -> Revision:
    """Reduce a ControllerRevision to its record; one that others wrote may lack anything."""
    meta, data = obj["metadata"], obj.get("data") or {}
    annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    revision = labels.get(LABEL_REVISION, "")
    template = data.get("template") or {}
    return Revision(
        name=meta["name"],
        number=obj.get("revision", 0),
        revision=revision,
        base=annotations.get(ANNOTATION_BASE, revision),
        spec_hash=annotations.get(ANNOTATION_SPEC_HASH, ""),
        operator_version=str(data.get("operatorVersion", "")),
        cause=annotations.get(ANNOTATION_CAUSE, ""),
        failed=annotations.get(ANNOTATION_FAILED, ""),
        promoted=annotations.get(ANNOTATION_PROMOTED, ""),
        restarted_at=annotations.get(ANNOTATION_RESTARTED_AT, ""),
        upgraded_at=annotations.get(ANNOTATION_UPGRADED_AT, ""),
        used=workload.used_by(template.get("spec") or {}),
    )


def newest(revisions: tuple[Revision, ...]) -> Revision | None:
    """Return the revision that came into force last."""
    return max(revisions, key=lambda each: (each.number, each.name), default=None)


def choose(service: InferenceService, built: str, observed: Observed, *, adopt: bool = False) -> Target:
    """Choose the revision in force. `built` is the label of the template that this operator builds from the spec.

    `adopt`: that template is to replace the one of another operator.
    """
    wanted = spec_hash(service)
    last = newest(observed.revisions)
    pin = newest(tuple(each for each in observed.revisions if each.spec_hash == wanted))
    if pin is None:
        return _first(service, wanted, built, observed)
    assert last is not None, "the pin is one of them"
    upgrade = adopt or service.upgraded_at not in ("", last.upgraded_at)
    if upgrade and (built != pin.base or pin.failed):
        return _built(service, wanted, built, observed, cause=WAVE if adopt else UPGRADED)
    if service.restarted_at not in ("", last.restarted_at):
        return _restarted(service, pin)
    requests = (service.restarted_at, service.upgraded_at)
    handled = (pin.restarted_at, pin.upgraded_at) == requests
    outdated = pin.operator_version if pin.base != built else ""
    if pin.failed and pin is last:
        good = _last_good(pin, observed)
        if good is not None:
            return _stored(good, name=pin.name, revision=pin.revision, failed=pin.failed, renew=not handled)
    renew = pin is not last or not handled
    return _stored(pin, name=pin.name, revision=pin.revision, built=built, outdated=outdated, renew=renew)


def is_canary(
    service: InferenceService, target: Target, revisions: tuple[Revision, ...], current: str
) -> bool:
    """Return whether the revision in force is a canary, held until it is promoted.

    `current`: the last revision that was Ready, or empty. Neither a first revision, nor a restart of the same template,
    nor a return to the old one is a canary.
    """
    if service.spec.rollout.canary is None or target.failed or current in ("", target.revision):
        return False
    if service.promoted_revision == target.revision:
        return False
    if any(each.name == target.name and each.promoted for each in revisions):
        return False
    return all(each.base != target.base for each in revisions if each.revision == current)


def _first(service: InferenceService, wanted: str, built: str, observed: Observed) -> Target:
    """Choose for a spec without a revision: it is new, or an operator without revisions served it, or they were deleted.

    In the latter two cases the Deployment has a template of this spec. It stays, whatever this operator would build.
    """
    live = observed.live_revision
    without_revisions = not observed.revisions and not observed.live_spec_hash
    known = observed.live_spec_hash == wanted or (without_revisions and observed.settled_revision == live)
    if live in ("", built) or not known:
        return _built(service, wanted, built, observed, cause=SPEC_CHANGED)
    return Target(
        name=object_name(service.name, wanted, live),
        revision=live,
        deployed=live,
        base=live,
        spec_hash=wanted,
        source="live",
        cause=ADOPTED,
    )


def _built(service: InferenceService, wanted: str, built: str, observed: Observed, *, cause: str) -> Target:
    name = object_name(service.name, wanted, built)
    return Target(
        name=name,
        revision=built,
        deployed=built,
        base=built,
        spec_hash=wanted,
        source="built",
        cause=cause,
        renew=any(each.name == name for each in observed.revisions),
    )


def _restarted(service: InferenceService, pin: Revision) -> Target:
    revision = digest([pin.base, service.restarted_at])
    return Target(
        name=object_name(service.name, pin.spec_hash, revision),
        revision=revision,
        deployed=revision,
        base=pin.base,
        spec_hash=pin.spec_hash,
        source="stored",
        stored=pin.name,
        restart=service.restarted_at,
        cause=RESTARTED,
        used=pin.used,
    )


def _stored(
    template: Revision,
    *,
    name: str,
    revision: str,
    built: str = "",
    outdated: str = "",
    failed: str = "",
    renew: bool = False,
) -> Target:
    return Target(
        name=name,
        revision=revision,
        deployed=template.revision,
        base=template.base,
        spec_hash=template.spec_hash,
        source="built" if template.revision == built else "stored",
        stored=template.name,
        outdated=outdated,
        failed=failed,
        renew=renew,
        used=template.used,
    )


def _last_good(failed: Revision, observed: Observed) -> Revision | None:
    """Return the revision to return to: the last one that was Ready before, else the newest that has not failed."""
    sound = tuple(each for each in observed.revisions if not each.failed and each.number < failed.number)
    was_ready = observed.current_revision
    if was_ready == failed.revision:
        was_ready = observed.baseline_revision
    ready = tuple(each for each in sound if each.revision == was_ready)
    return newest(ready or sound)


def renewal(service: InferenceService, target: Target, revisions: tuple[Revision, ...]) -> dict[str, Any]:
    """Return the merge patch by which an existing revision comes into force; a failure of an earlier attempt is forgotten."""
    last = newest(revisions)
    known = next((each for each in revisions if each.name == target.name), None)
    number = last.number if last is not None else 0
    annotations: dict[str, Any] = requests(service)
    if not target.failed:
        annotations[ANNOTATION_FAILED] = None
    if target.cause:
        annotations[ANNOTATION_CAUSE] = target.cause
    if known is not last:
        number += 1
    return {"metadata": {"annotations": annotations}, "revision": number}


def requests(service: InferenceService) -> dict[str, Any]:
    """Return the annotations that record the requests of an InferenceService; null removes one from an object."""
    return {
        ANNOTATION_RESTARTED_AT: service.restarted_at or None,
        ANNOTATION_UPGRADED_AT: service.upgraded_at or None,
    }


def restarted(template: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return a template annotated with the time of a restart, which makes it another revision."""
    meta = template["metadata"]
    annotations = {**(meta.get("annotations") or {}), ANNOTATION_POD_RESTARTED_AT: target.restart}
    labels = {**meta["labels"], LABEL_REVISION: target.deployed}
    return {**template, "metadata": {**meta, "annotations": annotations, "labels": labels}}


def surplus(target: Target, revisions: tuple[Revision, ...], in_use: set[str], limit: int) -> list[Revision]:
    """Return the revisions beyond the history limit, oldest first.

    `in_use` are the labels of pods and of the last Ready revision. Several specs may have one template, such as those
    with another size of the cache; the newest of these records it.
    """
    kept = {target.name, target.stored}
    by_number = sorted(revisions, key=lambda each: (each.number, each.name))
    kept |= {
        each.name for each in {each.revision: each for each in by_number}.values() if each.revision in in_use
    }
    old = [each for each in by_number if each.name not in kept]
    return old[: max(len(old) - limit, 0)]
