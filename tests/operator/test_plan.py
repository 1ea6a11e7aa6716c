"""The planner: steps from the observed to the desired state, in the right order and no further."""

import msgspec
import pytest
from services import hub, service

from skiff_operator import plan, workload
from skiff_operator.cache import Child, Entry
from skiff_operator.kinds import (
    CLAIM,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Stage,
)
from skiff_operator.revisions import Revision
from skiff_operator.rollout_analysis import Analysis, Figures
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService


def entry(of: InferenceService) -> Entry:
    """A service of which nothing exists yet."""
    built = plan.objects(of, Settings())
    return Entry(service=of, uid="u1", desired=plan.desired_state(built))


def settled(of: InferenceService) -> Entry:
    """A service of which everything exists as it should."""
    result = entry(of)
    assert result.desired is not None
    for key, digest in result.desired.digests.items():
        result.children[key] = Child(
            uid=f"uid-{key[1]}",
            resource_version="1",
            generation=1,
            digest=digest,
            metadata_digest="",
            owner="u1",
            in_sync=True,
        )
    return result


def steps(of: Entry) -> list[plan.Step]:
    """The plan."""
    assert of.desired is not None
    return plan.steps(of, of.desired)


def test_everything_is_created_in_the_order_in_which_pods_need_it() -> None:
    pending = steps(entry(service(model=hub(), cache={"size": "1Gi"}, replicas=2, networkPolicy={})))
    first = [SERVICE_ACCOUNT, CLAIM, NETWORK_POLICY, DEPLOYMENT]
    assert [step.kind for step in pending] == [*first, SERVICE, DISRUPTION_BUDGET]
    assert {step.action for step in pending} == {"create"}
    now, later = plan.first_stage(pending)
    assert [step.kind for step in now] == first
    assert later == Stage.NETWORK


def test_nothing_is_done_when_all_is_well() -> None:
    assert steps(settled(service())) == []
    assert plan.first_stage([]) == ([], Stage.STATUS)


def test_a_changed_spec_changes_what_differs_only() -> None:
    of = settled(service())
    of.desired = plan.desired_state(plan.objects(service(runtime={"dtype": "bfloat16"}), Settings()))
    assert [(step.action, step.kind) for step in steps(of)] == [("update", DEPLOYMENT)]


def test_drift_is_repaired() -> None:
    of = settled(service())
    of.children[(SERVICE, "llama")] = msgspec.structs.replace(of.children[(SERVICE, "llama")], in_sync=False)
    assert [(step.action, step.kind) for step in steps(of)] == [("update", SERVICE)]


@pytest.mark.parametrize(("owner", "pruned"), [("u1", True), ("someone", False), ("", False)])
def test_only_what_is_ours_is_pruned(owner: str, pruned: bool) -> None:
    of = settled(service(replicas=2))
    key = (DISRUPTION_BUDGET, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], owner=owner)
    of.desired = plan.desired_state(plan.objects(service(replicas=1), Settings()))
    deletions = [step for step in steps(of) if step.action == "delete"]
    assert [(step.kind, step.uid) for step in deletions] == (
        [(DISRUPTION_BUDGET, "uid-llama")] if pruned else []
    )


@pytest.mark.parametrize("owner", ["someone", ""])
def test_an_object_of_someone_else_is_in_the_way_even_when_it_is_identical(owner: str) -> None:
    of = settled(service())
    key = (SERVICE_ACCOUNT, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], owner=owner)
    assert [(step.action, step.kind) for step in steps(of)] == [("verify", SERVICE_ACCOUNT)]


def test_a_deployment_waits_for_what_its_pods_need() -> None:
    of = entry(service(model=hub(), cache={"size": "1Gi"}, replicas=2))
    made = settled(service(model=hub(), cache={"size": "1Gi"}, replicas=2)).children
    assert of.desired is not None

    def blocked() -> list[Kind]:
        assert of.desired is not None
        return [step.kind for step in steps(of) if plan.is_blocked(of, of.desired, step)]

    assert blocked() == [DEPLOYMENT]
    of.children[(SERVICE_ACCOUNT, "llama")] = made[(SERVICE_ACCOUNT, "llama")]
    assert blocked() == [DEPLOYMENT]
    claim = made[(CLAIM, "llama-cache")]
    of.children[(CLAIM, "llama-cache")] = msgspec.structs.replace(claim, owner="someone")
    assert blocked() == [DEPLOYMENT]
    of.children[(CLAIM, "llama-cache")] = msgspec.structs.replace(claim, in_sync=False)
    assert blocked() == [], "one that cannot be changed is there all the same"


def uncached(**counts: int) -> Entry:
    """A service whose cache is not asked for any more, with a Deployment that says so and its status."""
    of = settled(service(model=hub(), cache={"size": "1Gi"}))
    of.desired = plan.desired_state(plan.objects(service(model=hub()), Settings()))
    key = (DEPLOYMENT, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], digest=of.desired.digests[key])
    status = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, **counts}
    live = {"metadata": {"generation": 2}, "spec": {"replicas": 1}, "status": status}
    of.rollout = workload.read_rollout(live)
    return of


def test_a_claim_is_pruned_when_the_rollout_is_complete() -> None:
    assert [(step.action, step.kind) for step in steps(uncached())] == [("delete", CLAIM)]


@pytest.mark.parametrize(
    "unfinished", [{"observedGeneration": 1}, {"replicas": 2}, {"updatedReplicas": 0}, {"readyReplicas": 0}]
)
def test_a_claim_stays_while_the_rollout_goes_on(unfinished: dict[str, int]) -> None:
    assert steps(uncached(**unfinished)) == []


def test_a_claim_stays_until_the_deployment_is_changed() -> None:
    of = uncached()
    key = (DEPLOYMENT, "llama")
    of.children[key] = msgspec.structs.replace(of.children[key], digest="old")
    assert [step.action for step in steps(of)] == ["update"]


@pytest.mark.parametrize(("phase", "stays"), [("Running", True), ("Failed", False)])
@pytest.mark.parametrize("deleted", [{}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
def test_a_claim_stays_while_a_pod_mounts_it(phase: str, stays: bool, deleted: dict[str, str]) -> None:
    of = uncached()
    volume = {"name": "cache", "persistentVolumeClaim": {"claimName": "llama-cache"}}
    pod = {
        "metadata": {"name": "p", "uid": "p", "creationTimestamp": "2026-01-01T00:00:00Z", **deleted},
        "spec": {"volumes": [volume]},
    }
    of.pods["p"] = workload.read_pod({**pod, "status": {"phase": phase}}, gpu_resource="g")
    assert (steps(of) == []) is stays


@pytest.mark.parametrize(("phase", "stays"), [("RollingOut", True), ("Observing", True), ("Passed", False)])
def test_a_claim_stays_while_a_rollback_may_need_it(phase: str, stays: bool) -> None:
    of = uncached()
    old = Revision(
        name="llama-1",
        number=1,
        revision="old",
        base="old",
        spec_hash="h",
        operator_version="",
        used=frozenset({(CLAIM, "llama-cache")}),
    )
    of.revisions[old.name] = old
    of.children[(CONTROLLER_REVISION, old.name)] = msgspec.structs.replace(
        of.children[(DEPLOYMENT, "llama")], uid="r1"
    )
    of.analysis = Analysis(phase, Figures("new"), Figures("old"))
    assert (steps(of) == []) is stays
