"""From what exists to what is wanted, in the right order and no further."""

import msgspec
import pytest
from services import hub, service

from skiff_operator import plan
from skiff_operator.cache import Child, Entry
from skiff_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    Stage,
)
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService


def entry(wanted: InferenceService) -> Entry:
    """A service of which nothing exists yet."""
    built = plan.objects(wanted, Settings())
    return Entry(service=wanted, uid="u1", wanted=plan.summarize(built))


def settled(wanted: InferenceService) -> Entry:
    """A service of which everything exists as it should."""
    result = entry(wanted)
    assert result.wanted is not None
    for key, digest in result.wanted.digests.items():
        result.children[key] = Child(
            uid=f"uid-{key[1]}",
            resource_version="1",
            generation=1,
            digest=digest,
            shape="",
            owner="u1",
            intact=True,
        )
    return result


def steps(of: Entry) -> list[plan.Step]:
    """The plan."""
    assert of.wanted is not None
    return plan.steps(of, of.wanted)


def test_everything_is_created_in_the_order_in_which_pods_need_it() -> None:
    pending = steps(entry(service(model=hub(), cache={"size": "1Gi"}, replicas=2)))
    assert [step.kind for step in pending] == [SERVICE_ACCOUNT, CLAIM, DEPLOYMENT, SERVICE, DISRUPTION_BUDGET]
    assert not any(step.ours for step in pending)
    now, later = plan.first_stage(pending)
    assert [step.kind for step in now] == [SERVICE_ACCOUNT, CLAIM, DEPLOYMENT]
    assert later == Stage.NETWORK


def test_nothing_is_done_when_all_is_well() -> None:
    assert steps(settled(service())) == []
    assert plan.first_stage([]) == ([], Stage.STATUS)


def test_a_changed_spec_changes_what_differs_only() -> None:
    of = settled(service())
    of.wanted = plan.summarize(plan.objects(service(runtime={"dtype": "bfloat16"}), Settings()))
    assert [(step.action, step.kind, step.ours) for step in steps(of)] == [("apply", DEPLOYMENT, True)]


def test_drift_is_repaired() -> None:
    of = settled(service())
    of.children[(SERVICE, "llama")] = msgspec.structs.replace(of.children[(SERVICE, "llama")], intact=False)
    assert [(step.action, step.kind) for step in steps(of)] == [("apply", SERVICE)]


@pytest.mark.parametrize(("owner", "pruned"), [("u1", True), ("someone", False), ("", False)])
def test_only_what_is_ours_is_pruned(owner: str, pruned: bool) -> None:
    of = settled(service(replicas=2))
    key = (DISRUPTION_BUDGET, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], owner=owner)
    of.wanted = plan.summarize(plan.objects(service(replicas=1), Settings()))
    deletions = [step for step in steps(of) if step.action == "delete"]
    assert [(step.kind, step.uid) for step in deletions] == (
        [(DISRUPTION_BUDGET, "uid-llama")] if pruned else []
    )


def test_an_object_of_someone_else_is_not_taken_by_force() -> None:
    of = settled(service())
    key = (DEPLOYMENT, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], owner="someone", digest="")
    assert [(step.kind, step.ours) for step in steps(of)] == [(DEPLOYMENT, False)]
