"""Conditions follow from what was observed, and Ready means that the newest revision answers."""

from typing import Any

import msgspec
import pytest

from skiff_operator import events, status
from skiff_operator.status import Facts, Problem, Status, report
from skiff_operator.workload import Crash, PodState, Rollout

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
CRASH = Crash(reason="CrashLoop", exit_code=2, log_tail="boom", at="2026-01-01T00:00:05Z")


def pod(name: str = "p", revision: str = "new", **fields: Any) -> PodState:
    """A pod that loads its model."""
    values: dict[str, Any] = {"ready": False, "phase": "Loading", **fields}
    return PodState(name=name, uid=name, revision=revision, **values)


def ready(name: str = "r", revision: str = "new", **fields: Any) -> PodState:
    """A pod that answers."""
    return pod(name, revision, ready=True, phase="Serving", **fields)


PAIR = (ready("a"), ready("b"))


def facts(*pods: PodState, **fields: Any) -> Facts:
    """A service of two replicas with these pods."""
    values: dict[str, Any] = {
        "name": "llama",
        "generation": 1,
        "replicas": 2,
        "revision": "new",
        "url": "http://llama.default.svc/v1",
        "synced": True,
        "rollout": Rollout(desired=2),
        "pods": pods,
        "problem": None,
        **fields,
    }
    return Facts(**values)


def verdicts(of: Status) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    return {condition.type: (condition.status, condition.reason) for condition in of.conditions}


SERVED = report(facts(*PAIR), None, NOW)


def test_a_service_that_serves() -> None:
    assert verdicts(SERVED) == {
        "Ready": ("True", "Serving"),
        "ModelReady": ("True", "ModelLoaded"),
        "Available": ("True", "PodsReady"),
        "Progressing": ("False", "RolloutComplete"),
        "Degraded": ("False", "AsExpected"),
    }
    assert (SERVED.current_revision, SERVED.update_revision) == ("new", "new")
    assert (SERVED.replicas, SERVED.ready_replicas, SERVED.updated_replicas) == (2, 2, 2)
    assert SERVED.selector == "serving.skiff.dev/inferenceservice=llama"


@pytest.mark.parametrize(
    ("of", "progressing"),
    [
        (facts(ready(), pod()), "PodsStarting"),
        (facts(ready()), "PodsStarting"),
        (facts(*PAIR, replicas=9), "PodsStarting"),
        (facts(*PAIR, replicas=1), "PodsStopping"),
        (facts(*PAIR, rollout=Rollout(desired=2, replacing=True)), "RolloutInProgress"),
    ],
)
def test_one_pod_of_the_revision_alone_makes_it_ready(of: Facts, progressing: str) -> None:
    """Ready needs no more; the replica counts and Progressing say the rest."""
    found = verdicts(report(of, None, NOW))
    assert found["Ready"] == ("True", "Serving")
    assert found["Progressing"] == ("True", progressing)
    assert found["Degraded"] == ("False", "AsExpected")


@pytest.mark.parametrize(
    "of",
    [
        facts(rollout=None),
        facts(*PAIR, synced=False),
        facts(pod("a"), pod("b")),
        facts(ready("a"), ready("b"), ready("c", "old")),
        facts(ready("a"), ready("b"), pod("c", "old")),
        facts(ready("a", "old"), ready("b", "old")),
        facts(ready("a", "old"), replicas=0),
    ],
)
def test_without_a_pod_of_the_revision_or_with_an_older_one_it_is_not_ready(of: Facts) -> None:
    found = report(of, None, NOW)
    assert verdicts(found)["Ready"] == ("False", "RolloutInProgress")
    assert verdicts(found)["Progressing"] == ("True", "RolloutInProgress")
    assert found.current_revision == ""


def test_during_a_rollout_old_pods_keep_it_available() -> None:
    written = report(facts(ready("a", "old"), ready("b", "old"), pod("c")), None, NOW)
    found = verdicts(written)
    assert found["Available"][0] == "True"
    assert found["ModelReady"] == ("False", "LoadingModel")
    assert (written.replicas, written.ready_replicas, written.updated_replicas) == (3, 2, 1)


def test_a_service_all_of_whose_pods_are_lost_is_in_no_rollout() -> None:
    found = verdicts(report(facts(pod("a")), SERVED, NOW))
    assert found["Ready"] == ("False", "PodsStarting")
    assert found["Available"] == ("False", "NoReadyPods")


def test_trouble_of_the_new_revision_is_reported_and_not_the_olds() -> None:
    pods = (pod("a", "old", trouble="OutOfMemory"), pod("b", trouble="ImagePullFailed", message="no image"))
    written = report(facts(*pods), None, NOW)
    assert verdicts(written)["Degraded"] == ("True", "ImagePullFailed")
    assert verdicts(written)["Ready"] == ("False", "ImagePullFailed")
    condition = written.condition("Degraded")
    assert condition is not None and condition.message == "pod b: no image"


def test_blocked_and_stalled_deployments_are_reported() -> None:
    blocked = report(facts(rollout=Rollout(desired=2, blocked="exceeded quota")), None, NOW)
    assert verdicts(blocked)["Degraded"] == ("True", "PodCreateFailed")
    stalled = report(facts(rollout=Rollout(desired=2, stalled="too slow")), None, NOW)
    assert verdicts(stalled)["Progressing"] == ("False", "ProgressDeadlineExceeded")


def test_a_shortage_of_nodes_is_reported_while_no_pod_has_one() -> None:
    waiting = pod(phase="Scheduling", trouble="InsufficientGPU", message="0/3 nodes")
    lacking = facts(waiting, shortage="no node has 64 GPUs")
    assert not lacking.placed
    written = report(lacking, None, NOW)
    assert verdicts(written)["Degraded"] == ("True", "NoNodeLargeEnough")
    assert verdicts(written)["Ready"] == ("False", "NoNodeLargeEnough")
    assert facts(*PAIR).placed and facts(replicas=0, rollout=None).placed
    assert facts(waiting, pod("q")).placed


def test_an_invalid_spec_leaves_the_pods_at_work() -> None:
    problem = Problem("InvalidSpec", "fix it")
    found = verdicts(report(facts(*PAIR, synced=False, problem=problem), None, NOW))
    assert found["Ready"] == found["Progressing"] == ("False", "InvalidSpec")
    assert found["Degraded"] == ("True", "InvalidSpec")
    assert found["Available"] == ("True", "PodsReady")


def test_a_problem_beside_the_pods_degrades_a_service_that_serves() -> None:
    found = verdicts(report(facts(*PAIR, problem=Problem("ApplyFailed", "quota")), None, NOW))
    assert found["Ready"] == ("True", "Serving")
    assert found["Progressing"] == ("False", "RolloutComplete")
    assert found["Degraded"] == ("True", "ApplyFailed")


@pytest.mark.parametrize("left", [(), PAIR, (pod(ended=NOW, trouble="Evicted"),)])
def test_scaled_to_zero_is_ready_and_not_degraded(left: tuple[PodState, ...]) -> None:
    found = verdicts(report(facts(*left, replicas=0), SERVED, NOW))
    assert found["Ready"] == ("True", "ScaledToZero")
    assert found["Degraded"] == ("False", "AsExpected")
    if left != PAIR:
        assert found["ModelReady"] == found["Available"] == ("False", "ScaledToZero")
        assert found["Progressing"] == ("False", "RolloutComplete")


def test_times_move_only_with_the_status() -> None:
    first = report(facts(pod("a")), None, NOW)
    same = report(facts(pod("a", trouble="CrashLoop"), ready("b", "old")), first, LATER)
    times = {condition.type: condition.last_transition_time for condition in same.conditions}
    assert times == {
        "Ready": NOW,
        "ModelReady": NOW,
        "Available": LATER,
        "Progressing": NOW,
        "Degraded": LATER,
    }


def test_reporting_again_changes_nothing() -> None:
    assert report(facts(*PAIR), SERVED, LATER) == SERVED
    stored = msgspec.json.decode(msgspec.json.encode(SERVED))
    assert status.read(stored) == SERVED


def test_the_last_failure_is_the_newest_and_goes_when_all_is_well() -> None:
    older = msgspec.structs.replace(CRASH, at="2026-01-01T00:00:01Z")
    written = report(facts(pod("a", crash=CRASH), pod("b", crash=older)), None, NOW)
    failure = written.last_failure
    assert failure is not None
    assert (failure.pod, failure.exit_code, failure.log_tail) == ("a", 2, "boom")
    waiting = report(facts(pod("c"), ready("d")), written, NOW)
    assert waiting.last_failure == failure, "a new pod that still starts does not hide it"
    assert report(facts(*PAIR), waiting, NOW).last_failure is None


def test_a_pod_that_recovered_keeps_its_last_failure_as_history() -> None:
    """As long as the pod lives and the API server shows it; nothing is wrong with it now."""
    written = report(facts(ready("a", crash=CRASH), ready("b")), None, NOW)
    assert written.last_failure is not None and written.last_failure.at == CRASH.at
    assert verdicts(written)["Degraded"] == ("False", "AsExpected")
    assert report(facts(*PAIR), written, NOW).last_failure is None


def test_a_failed_pod_is_blamed_until_all_is_well_and_not_for_ever() -> None:
    failed = pod("a", ended=NOW, trouble="Evicted", message="disk", crash=CRASH)
    broken = report(facts(failed, ready("b")), SERVED, "2026-01-01T00:09:00Z")
    assert verdicts(broken)["Ready"] == ("True", "Serving")
    assert verdicts(broken)["Degraded"] == ("True", "Evicted")
    assert broken.last_failure is not None and (broken.replicas, broken.updated_replicas) == (1, 1)
    for later in (facts(failed, *PAIR), facts(failed, *PAIR, replicas=3)):
        written = report(later, SERVED, "2026-01-01T00:10:00Z")
        assert verdicts(written)["Degraded"] == ("False", "AsExpected")
        assert written.last_failure is None


def test_events_tell_transitions_once() -> None:
    def sent_events(before: Status | None, after: Status) -> list[tuple[str, str]]:
        return [(news.type, news.reason) for news in events.announcements(before, after)]

    starting = report(facts(pod()), None, NOW)
    crashing = report(facts(pod(trouble="CrashLoop", message="1")), starting, NOW)
    again = report(facts(pod(trouble="CrashLoop", message="2")), crashing, NOW)
    serving = report(facts(*PAIR), again, NOW)
    edited = report(facts(*PAIR, revision="newer", synced=False), serving, NOW)
    zero = report(facts(replicas=0), serving, NOW)
    woken = report(facts(pod()), zero, NOW)
    assert sent_events(None, starting) == []
    assert sent_events(starting, crashing) == [("Warning", "CrashLoop")]
    assert sent_events(crashing, again) == []
    assert sent_events(again, serving) == [("Normal", "Ready")]
    assert sent_events(serving, serving) == []
    assert sent_events(serving, edited) == [("Normal", "RolloutStarted")]
    assert sent_events(serving, zero) == sent_events(zero, woken) == sent_events(None, zero) == []
    assert sent_events(zero, serving) == sent_events(woken, serving) == [("Normal", "Ready")]


@pytest.mark.parametrize("stored", [None, "text", {}, {"conditions": 1}, {"observedGeneration": "1"}])
def test_a_status_of_another_shape_is_none(stored: Any) -> None:
    assert status.read(stored) is None


SAID = "no room (needs 1 nvidia.com/gpu, 0 free): the service is interrupted while its only pod is replaced"
WAITING = pod("new", phase="Scheduling", trouble="InsufficientGPU", message="0/1 nodes are available")


@pytest.mark.parametrize(
    ("ends_by", "progressing", "message", "degraded"),
    [
        (
            LATER,
            "ReplacingPods",
            f"{SAID}. 0 of 1 pods of revision new answer; pod old finishes its requests",
            "False",
        ),
        (
            "2025-12-31T23:59:31Z",
            "ReplacingPods",
            "pod old finishes its requests, until 2025-12-31T23:59:31Z",
            "False",
        ),
        (
            "2025-12-31T23:59:29Z",
            "RolloutBlocked",
            "PodStuckTerminating: pod old should have ended by",
            "True",
        ),
    ],
)
def test_a_replacement_waits_for_the_old_pod_until_that_is_overdue(
    ends_by: str, progressing: str, message: str, degraded: str
) -> None:
    old = pod("old", "old", phase="Terminating", terminating=True, ends_by=ends_by)
    before = report(facts(ready(revision="old"), revision="old", replicas=1), None, NOW)
    found = report(facts(WAITING, replicas=1, draining=(old,), announcement=SAID), before, NOW)
    condition = found.condition("Progressing")
    assert condition is not None and (condition.status, condition.reason) == ("True", progressing)
    assert message in condition.message
    assert verdicts(found)["Degraded"][0] == degraded


def test_a_blocked_rollout_keeps_its_reason_when_it_stalls() -> None:
    """The deadline of the Deployment says less than what blocks it."""
    stalled = Rollout(desired=2, replacing=True, stalled="has timed out progressing")
    broken = pod(trouble="ImagePullFailed", message="image x: not found")
    found = report(facts(broken, ready(revision="old"), rollout=stalled), SERVED, NOW).condition(
        "Progressing"
    )
    assert found is not None and (found.status, found.reason) == ("False", "ProgressDeadlineExceeded")
    assert "ImagePullFailed" in found.message and "Way out: correct runtime.image" in found.message


def test_an_event_explains_a_pod_whose_containers_are_not_created() -> None:
    early, late = pod(placed_at="2026-01-01T00:00:00Z"), "2026-01-01T00:00:15Z"
    assert status.slow_pod(facts(early), "2026-01-01T00:00:14Z") is None
    assert status.slow_in_seconds(facts(early), "2026-01-01T00:00:05Z") == 10
    assert status.slow_pod(facts(early), late) == early and status.slow_in_seconds(facts(early), late) == 0
    assert status.slow_pod(facts(ready()), late) is None
    obstacle = Problem("VolumeNotMounted", "pod p: Multi-Attach error")
    assert verdicts(report(facts(early, obstacle=obstacle), None, NOW))["Ready"] == (
        "False",
        "VolumeNotMounted",
    )
