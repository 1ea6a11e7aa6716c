"""The pod template that the operator would give an edited InferenceService, by the operator's own choice of a revision.

A template is pinned (decision 0033), so pods restart when the edit leads to another recorded template or to a new one,
and not because this program would build another template than the operator did. Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from skiff_operator import plan, revisions, spec, workload
from skiff_operator import status as status_of
from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import deployment, model_cache_claim
from skiff_operator.resources.metadata import LABEL_REVISION
from skiff_operator.revisions import Observed, Revision, Target
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_operator.status import UPGRADE_AVAILABLE

_BUILT_ANEW: Final = "built anew"
"""In place of the label of a template that the installed operator builds and this program cannot know."""


class Live(NamedTuple):
    """An InferenceService in the cluster, its Deployment if there is one of its own, and its ControllerRevisions."""

    service: dict[str, Any]
    deployment: dict[str, Any] | None
    revisions: tuple[dict[str, Any], ...]

    def records(self) -> tuple[Revision, ...]:
        """Return the revisions as the operator keeps them."""
        return tuple(revisions.read(each) for each in self.revisions)


class PlannedTemplate(NamedTuple):
    """The template of the pods after an edit. `restarts`: pods of another one run now and are replaced.

    `deployment` is the Deployment that is built from the spec, with that template.
    """

    deployment: dict[str, Any]
    revision: str
    restarts: bool


def build(service: InferenceService, candidates: Iterable[Settings]) -> tuple[dict[str, Any], Settings]:
    """Build the Deployment with the first settings that permit the spec, and return those too.

    Raises:
        InvalidSpec: none of them do.
    """
    refusal = InvalidSpec("no settings")
    for settings in candidates:
        try:
            return plan.built_deployment(plan.objects(service, settings)), settings
        except InvalidSpec as error:
            refusal = error
    raise refusal


def choose(live: Live, edited: InferenceService, candidates: Sequence[Settings]) -> PlannedTemplate:
    """Choose the template of an edited InferenceService.

    Raises:
        InvalidSpec: the edited spec is invalid.
    """
    before = _parse(live.service)
    if live.deployment is not None:
        mounted = model_cache_claim.mounted_cache(live.deployment)
        if before is not None:
            if spec.has_same_source(before.spec, edited.spec):
                edited = msgspec.structs.replace(edited, model_cache=mounted)
            before = msgspec.structs.replace(before, model_cache=mounted)
    made, settings = build(edited, candidates)
    if live.deployment is None:
        return PlannedTemplate(made, deployment.revision(made), restarts=False)
    rollout = workload.read_rollout(live.deployment)
    status = status_of.read(live.service.get("status"))
    settled = status is not None and status.observed_generation == edited.generation
    observed = Observed(
        revisions=live.records(),
        live_revision=rollout.revision,
        live_spec_hash=rollout.spec_hash,
        settled_revision=status.update_revision if status is not None and settled else "",
        current_revision=status.current_revision if status is not None else "",
    )
    built = _label_of_operator(live, before, deployment.revision(made), settings, rollout.revision)
    target = revisions.choose(edited, built, observed)
    template = _template(live, target, made)
    return PlannedTemplate(
        deployment.with_template(made, template, target.spec_hash),
        target.deployed,
        restarts=target.deployed != rollout.revision,
    )


def _label_of_operator(
    live: Live, before: InferenceService | None, built: str, settings: Settings, running: str
) -> str:
    """Return the label of the template that the operator builds from the edited spec, where this program builds `built`.

    If this program builds the same from both specs, so does the operator: what it built from the live one, unless another
    operator did.
    """
    try:
        same = before is not None and deployment.revision(build(before, [settings])[0]) == built
    except InvalidSpec:
        same = False
    if not same or before is None:
        return built
    status = status_of.read(live.service.get("status"))
    outdated = status.condition(UPGRADE_AVAILABLE) if status is not None else None
    if outdated is not None and outdated.status == "True":
        return _BUILT_ANEW
    wanted = revisions.spec_hash(before)
    pin = revisions.newest(tuple(each for each in live.records() if each.spec_hash == wanted))
    return running if pin is None else pin.base


def _template(live: Live, target: Target, made: dict[str, Any]) -> dict[str, Any]:
    """Return the template of the chosen revision; one that is built anew is this program's."""
    built: dict[str, Any] = made["spec"]["template"]
    if target.source == "live" and live.deployment is not None:
        found: dict[str, Any] = live.deployment["spec"]["template"]
        return found
    if target.source == "built" and target.stored == "":
        return _labelled(built, target.deployed)
    for each in live.revisions:
        if each["metadata"]["name"] == target.stored:
            recorded: dict[str, Any] = each["data"]["template"]
            return revisions.restarted(recorded, target) if target.restart else recorded
    return _labelled(built, target.deployed)


def _labelled(template: dict[str, Any], revision: str) -> dict[str, Any]:
    meta = template["metadata"]
    return {**template, "metadata": {**meta, "labels": {**meta["labels"], LABEL_REVISION: revision}}}


def _parse(obj: dict[str, Any]) -> InferenceService | None:
    """Parse a live object; None while its spec is invalid."""
    try:
        return spec.parse(obj)
    except InvalidSpec:
        return None
