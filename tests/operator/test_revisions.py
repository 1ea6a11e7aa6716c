"""The choice of the revision in force: what is pinned, what is built anew, and what a failure returns to."""

from typing import Any

import msgspec
import pytest
from services import raw, service

from skiff_operator import revisions, rollback, spec
from skiff_operator.cache import Child, Entry
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import CONTROLLER_REVISION
from skiff_operator.resources import pod
from skiff_operator.revisions import Observed, Revision, choose
from skiff_operator.settings import Settings
from skiff_operator.status import Condition, Status
from skiff_operator.workload import PodState, Rollout

SERVICE = service()
HASH = revisions.spec_hash(SERVICE)


def record(number: int = 1, revision: str = "old", **fields: Any) -> Revision:
    """A revision of the present spec."""
    values: dict[str, Any] = {"base": revision, "spec_hash": HASH, "operator_version": "0.1.0", **fields}
    name = revisions.object_name("llama", values["spec_hash"], revision)
    return Revision(name=name, number=number, revision=revision, **values)


def requested(**fields: str) -> spec.InferenceService:
    """The service with requests."""
    return msgspec.structs.replace(SERVICE, **fields)


def test_the_hash_counts_what_pods_depend_on_and_no_defaults() -> None:
    assert revisions.pod_spec(SERVICE) == {"model": {"uri": "demo://"}}
    for same in ({"replicas": 3}, {"rollout": {"paused": True}}, {"runtime": {"dtype": "auto"}, "drain": {}}):
        assert revisions.spec_hash(service(**same)) == HASH
    assert revisions.spec_hash(service(runtime={"dtype": "float16"})) != HASH


def test_a_spec_without_a_revision_is_built() -> None:
    for observed in (
        Observed(),
        Observed(revisions=(record(spec_hash="other"),), live_revision="old", live_spec_hash="other"),
        Observed(live_revision="old", live_spec_hash="", settled_revision=""),
        Observed(live_revision="new"),
    ):
        target = choose(SERVICE, "new", observed)
        assert (target.source, target.revision, target.renew) == ("built", "new", False)


@pytest.mark.parametrize(
    "observed",
    [
        Observed(live_revision="old", settled_revision="old"),
        Observed(live_revision="old", live_spec_hash=HASH),
        Observed(revisions=(record(spec_hash="other"),), live_revision="old", live_spec_hash=HASH),
    ],
    ids=["an operator without revisions", "all revisions deleted", "this one deleted"],
)
def test_a_live_template_of_the_spec_is_adopted(observed: Observed) -> None:
    target = choose(SERVICE, "new", observed)
    assert (target.source, target.deployed, target.spec_hash) == ("live", "old", HASH)


def test_the_newest_revision_of_the_spec_is_pinned() -> None:
    known = (record(1, "older"), record(2, "old"))
    target = choose(SERVICE, "new", Observed(revisions=known))
    assert (target.source, target.stored, target.outdated) == ("stored", known[1].name, "0.1.0")
    same = choose(SERVICE, "old", Observed(revisions=known))
    assert (same.source, same.outdated, same.renew) == ("built", "", False)
    adopted = choose(SERVICE, "new", Observed(revisions=known), adopt=True)
    assert (adopted.source, adopted.revision, adopted.cause) == ("built", "new", revisions.WAVE)


def test_a_spec_that_is_changed_back_finds_its_revision() -> None:
    known = (record(1, "old", failed="CrashLoop: 1"), record(2, "other", spec_hash="other"))
    target = choose(SERVICE, "new", Observed(revisions=known))
    assert (target.stored, target.failed, target.renew) == (known[0].name, "", True)
    patch = revisions.renewal(SERVICE, target, known)
    assert patch["revision"] == 3
    assert patch["metadata"]["annotations"][revisions.ANNOTATION_FAILED] is None


def test_requests_are_handled_once() -> None:
    asked = requested(upgraded_at="t1")
    assert choose(asked, "new", Observed(revisions=(record(),))).cause == revisions.UPGRADED
    nothing_new = choose(asked, "old", Observed(revisions=(record(),)))
    assert nothing_new.renew and nothing_new.revision == "old", "only the request is recorded"
    done = record(2, "new", upgraded_at="t1")
    assert not choose(asked, "new", Observed(revisions=(record(), done))).renew

    asked = requested(restarted_at="t1")
    target = choose(asked, "new", Observed(revisions=(record(),)))
    assert (target.source, target.restart, target.base) == ("stored", "t1", "old"), "a restart is no upgrade"
    done = record(2, target.revision, base="old", restarted_at="t1")
    after = choose(asked, "old", Observed(revisions=(record(), done)))
    assert (after.revision, after.outdated, after.renew) == (target.revision, "", False)


def test_a_failed_revision_yields_to_the_last_ready_one_until_it_is_asked_for_again() -> None:
    known = (
        record(1, "good", spec_hash="a"),
        record(2, "never", spec_hash="b"),
        record(3, "bad", failed="x"),
    )
    observed = Observed(revisions=known, current_revision="good")
    target = choose(SERVICE, "bad", observed)
    assert (target.name, target.revision, target.deployed) == (known[2].name, "bad", "good")
    assert (target.stored, target.spec_hash, target.failed) == (known[0].name, "a", "x")
    without_status = choose(SERVICE, "bad", Observed(revisions=known))
    assert without_status.deployed == "never", "the newest that has not failed"
    after_its_rollout = Observed(revisions=known, current_revision="bad", baseline_revision="good")
    assert choose(SERVICE, "bad", after_its_rollout).deployed == "good"
    again = choose(requested(restarted_at="t1"), "bad", observed)
    assert again.stored == known[2].name and again.revision not in ("bad", "good") and not again.failed
    upgraded = choose(requested(upgraded_at="t1"), "bad", observed)
    assert (upgraded.deployed, upgraded.renew) == ("bad", True)
    alone = choose(SERVICE, "bad", Observed(revisions=known[2:]))
    assert alone.deployed == "bad", "there is nothing to return to"


def test_the_history_keeps_what_has_pods_or_was_ready_last() -> None:
    known = tuple(record(number, str(number), spec_hash=str(number)) for number in range(1, 8))
    target = choose(SERVICE, "8", Observed(revisions=known))
    old = revisions.surplus(target, known, {"2", "3"}, 2)
    assert [each.revision for each in old] == ["1", "4", "5"]
    assert revisions.surplus(target, known, set(), 10) == []
    alike = tuple(record(number, "one", spec_hash=str(number)) for number in range(1, 8))
    assert [each.number for each in revisions.surplus(target, alike, {"one"}, 2)] == [1, 2, 3, 4]


def failing(**changes: Any) -> Entry:
    """A service whose new revision crashes since 00:00:10, while the old one serves."""
    pods = (
        PodState(name="a", uid="a", revision="good", ready=True, phase="Serving"),
        PodState(
            name="b", uid="b", revision="bad", ready=False, phase="Loading", trouble="CrashLoop", message="1"
        ),
    )
    degraded = Condition("Degraded", "True", "CrashLoop", "pod b: 1", "2026-01-01T00:00:10Z", 1)
    known = (record(1, "good", spec_hash="a"), record(2, "bad"))
    values: dict[str, Any] = {
        "service": service(rollout={"autoRollback": True}),
        "uid": "u1",
        "status": Status(1, 2, 1, 1, "", "", "bad", (degraded,), "good"),
        "rollout": Rollout(desired=1),
        "revisions": {each.name: each for each in known},
        "children": {(CONTROLLER_REVISION, each.name): child() for each in known},
        "pods": {pod.name: pod for pod in pods},
        **changes,
    }
    return Entry(**values)


def child() -> Child:
    return Child("uid", "1", 1, "", "", "u1", True)


def reason(entry: Entry, at: str = "2026-01-01T00:01:10Z") -> str:
    """Why the revision in force is rolled back, a minute after its first crash."""
    assert entry.service is not None
    target = choose(entry.service, "bad", entry.observed("llama"))
    return rollback.reason(entry, target, at, 60.0)


def test_a_revision_fails_by_its_pods_or_its_deadline() -> None:
    assert reason(failing()) == "CrashLoop: 1"
    assert reason(failing(), "2026-01-01T00:01:09Z") == "", "one crash is no failure"
    stalled = Rollout(desired=1, stalled="too slow")
    assert reason(failing(rollout=stalled, pods={})) == "ProgressDeadlineExceeded: too slow"


@pytest.mark.parametrize(
    "changes",
    [
        {"service": service()},
        {"service": service(rollout={"autoRollback": True, "paused": True})},
        {"service": service(rollout={"autoRollback": True}, replicas=0)},
        {"status": None},
        {"status": Status(1, 2, 1, 1, "", "", "bad", (), "bad")},
        {"status": Status(1, 2, 1, 1, "", "", "bad", (), "")},
        {"pods": {"b": PodState(name="b", uid="b", revision="bad", ready=True, phase="Serving")}},
        {
            "pods": {
                "b": PodState(
                    name="b",
                    uid="b",
                    revision="bad",
                    ready=False,
                    phase="Scheduling",
                    trouble="InsufficientGPU",
                )
            }
        },
    ],
    ids=["off", "paused", "zero", "no status", "was ready", "none was", "a pod serves", "no room"],
)
def test_nothing_else_is_a_failure_of_the_revision(changes: dict[str, Any]) -> None:
    assert reason(failing(**changes)) == ""


@pytest.mark.parametrize(
    ("wrong", "flags", "said"),
    [
        ({"hostNetwork": True}, {}, "hostNetwork"),
        ({"serviceAccountName": "admin"}, {}, "serviceAccountName"),
        (
            {"volumes": [{"name": "etc", "hostPath": {"path": "/etc"}}]},
            {"allow_privileged_pods": True},
            "hostPath",
        ),
    ],
)
def test_a_recorded_template_has_no_rights_that_a_new_one_would_not_get(
    wrong: dict[str, Any], flags: dict[str, Any], said: str
) -> None:
    template = pod.build(SERVICE, Settings())
    pod.check_recorded(template, SERVICE, Settings())
    template["spec"].update(wrong)
    with pytest.raises(InvalidSpec, match=f"{said}.*skiff rollout upgrade llama"):
        pod.check_recorded(template, SERVICE, Settings(**flags))
    pod.check_recorded(template, SERVICE, Settings(allow_privileged_pods=True, allow_host_path=True))


def test_requests_are_read_from_annotations_within_a_limit() -> None:
    obj = raw()
    obj["metadata"]["annotations"] = {spec.ANNOTATION_RESTARTED_AT: "x" * 1000}
    assert spec.parse(obj).requests == ("x" * 64, "")
