"""Conditions follow from what was observed, and Ready means that the newest revision answers."""

from typing import Any

import msgspec
import pytest

from skiff_operator import events, status
from skiff_operator.status import Facts, Problem, Status, report
from skiff_operator.workload import Crash, PodState, Rollout

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def rollout(total: int = 2, updated: int = 2, ready: int = 2, **fields: Any) -> Rollout:
    """A Deployment of two replicas whose status is up to date."""
    return Rollout(
        **{"generation": 1, "observed_generation": 1, "desired": 2}
        | {"total": total, "updated": updated, "ready": ready}
        | fields
    )


def pod(name: str = "p", revision: str = "new", **fields: Any) -> PodState:
    """A pod that loads its model."""
    values: dict[str, Any] = {"ready": False, "phase": "Loading", **fields}
    return PodState(name=name, uid=name, revision=revision, **values)


def facts(**fields: Any) -> Facts:
    """A service of two replicas that serves."""
    values: dict[str, Any] = {
        "name": "llama",
        "generation": 1,
        "replicas": 2,
        "revision": "new",
        "url": "http://llama.default.svc/v1",
        "synced": True,
        "rollout": rollout(),
        "pods": (),
        "problem": None,
        **fields,
    }
    return Facts(**values)


def verdicts(of: Status) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    return {condition.type: (condition.status, condition.reason) for condition in of.conditions}


def test_a_service_that_serves() -> None:
    written = report(facts(), None, NOW)
    assert verdicts(written) == {
        "Ready": ("True", "Serving"),
        "ModelReady": ("True", "ModelLoaded"),
        "Available": ("True", "PodsReady"),
        "Progressing": ("False", "RolloutComplete"),
        "Degraded": ("False", "AsExpected"),
    }
    assert (written.current_revision, written.update_revision) == ("new", "new")
    assert written.selector == "serving.skiff.dev/inferenceservice=llama"


NOT_READY = [
    {"rollout": None},
    {"synced": False},
    {"rollout": rollout(generation=2)},
    {"rollout": rollout(total=3, updated=1, ready=3)},
    {"rollout": rollout(updated=1)},
    {"rollout": rollout(ready=1)},
    {"rollout": rollout(total=3)},
]


@pytest.mark.parametrize("fields", NOT_READY)
def test_old_pods_do_not_make_it_ready(fields: dict[str, Any]) -> None:
    found = verdicts(report(facts(**fields), None, NOW))
    assert found["Ready"] == ("False", "RolloutInProgress")
    assert found["Progressing"] == ("True", "RolloutInProgress")


def test_during_a_rollout_old_pods_keep_it_available() -> None:
    pods = (pod("a", "old", ready=True), pod("b", "old", ready=True), pod("c"))
    written = report(facts(rollout=rollout(total=3, updated=1, ready=2), pods=pods), None, NOW)
    found = verdicts(written)
    assert found["Available"][0] == "True"
    assert found["ModelReady"] == ("False", "LoadingModel")
    assert written.current_revision == ""


def test_trouble_of_the_new_revision_is_told_and_not_the_olds() -> None:
    pods = (pod("a", "old", trouble="OutOfMemory"), pod("b", trouble="ImagePullFailed", message="no image"))
    written = report(facts(rollout=rollout(updated=1, ready=1), pods=pods), None, NOW)
    assert verdicts(written)["Degraded"] == ("True", "ImagePullFailed")
    assert verdicts(written)["Ready"] == ("False", "ImagePullFailed")
    condition = written.condition("Degraded")
    assert condition is not None and condition.message == "pod b: no image"


def test_blocked_and_stalled_deployments_are_told() -> None:
    blocked = report(facts(rollout=rollout(ready=0, blocked="exceeded quota")), None, NOW)
    assert verdicts(blocked)["Degraded"] == ("True", "PodCreateFailed")
    stalled = report(facts(rollout=rollout(ready=0, stalled="too slow")), None, NOW)
    assert verdicts(stalled)["Progressing"] == ("False", "ProgressDeadlineExceeded")


def test_a_shortage_of_nodes_is_reported_while_no_pod_has_one() -> None:
    waiting = pod(phase="Scheduling", trouble="InsufficientGPU", message="0/3 nodes")
    lacking = facts(rollout=rollout(ready=0), pods=(waiting,), shortage="no node has 64 GPUs")
    assert not lacking.placed
    written = report(lacking, None, NOW)
    assert verdicts(written)["Degraded"] == ("True", "NoNodeLargeEnough")
    assert verdicts(written)["Ready"] == ("False", "NoNodeLargeEnough")
    assert facts().placed and facts(replicas=0, rollout=None).placed
    assert facts(rollout=rollout(ready=0), pods=(waiting, pod("q"))).placed


def test_an_invalid_spec_leaves_the_pods_at_work() -> None:
    found = verdicts(report(facts(synced=False, problem=Problem("InvalidSpec", "fix it")), None, NOW))
    assert found["Ready"] == found["Progressing"] == ("False", "InvalidSpec")
    assert found["Degraded"] == ("True", "InvalidSpec")
    assert found["Available"] == ("True", "PodsReady")


def test_scaled_to_zero_is_neither_ready_nor_degraded() -> None:
    found = verdicts(report(facts(replicas=0, rollout=rollout(0, 0, 0, desired=0)), None, NOW))
    assert found["Ready"] == ("False", "ScaledToZero")
    assert found["Degraded"][0] == "False"
    assert found["ModelReady"][0] == "False"


def test_times_move_only_with_the_status() -> None:
    first = report(facts(rollout=rollout(ready=0)), None, NOW)
    same = report(facts(rollout=rollout(ready=1), pods=(pod(trouble="CrashLoop"),)), first, LATER)
    times = {condition.type: condition.last_transition_time for condition in same.conditions}
    assert times == {
        "Ready": NOW,
        "ModelReady": NOW,
        "Available": LATER,
        "Progressing": NOW,
        "Degraded": LATER,
    }


def test_reporting_again_changes_nothing() -> None:
    first = report(facts(), None, NOW)
    assert report(facts(), first, LATER) == first
    stored = msgspec.json.decode(msgspec.json.encode(first))
    assert status.read(stored) == first


def test_the_last_failure_is_the_newest_and_goes_when_all_is_well() -> None:
    crash = Crash(reason="CrashLoop", exit_code=2, log_tail="boom", at="2026-01-01T00:00:05Z")
    older = msgspec.structs.replace(crash, at="2026-01-01T00:00:01Z")
    broken = facts(rollout=rollout(ready=0), pods=(pod("a", crash=crash), pod("b", crash=older)))
    written = report(broken, None, NOW)
    failure = written.last_failure
    assert failure is not None
    assert (failure.pod, failure.exit_code, failure.log_tail) == ("a", 2, "boom")
    waiting = report(facts(rollout=rollout(ready=0)), written, NOW)
    assert waiting.last_failure == failure, "a new pod that still starts does not hide it"
    assert report(facts(), waiting, NOW).last_failure is None


def test_events_tell_transitions_once() -> None:
    def told(before: Status | None, after: Status) -> list[tuple[str, str]]:
        return [(news.type, news.reason) for news in events.announcements(before, after)]

    starting = report(facts(rollout=rollout(ready=0)), None, NOW)
    crashing = report(
        facts(rollout=rollout(ready=0), pods=(pod(trouble="CrashLoop", message="1"),)), starting, NOW
    )
    again = report(
        facts(rollout=rollout(ready=0), pods=(pod(trouble="CrashLoop", message="2"),)), crashing, NOW
    )
    serving = report(facts(), again, NOW)
    edited = report(facts(revision="newer", synced=False), serving, NOW)
    assert told(None, starting) == []
    assert told(starting, crashing) == [("Warning", "CrashLoop")]
    assert told(crashing, again) == []
    assert told(again, serving) == [("Normal", "Ready")]
    assert told(serving, serving) == []
    assert told(serving, edited) == [("Normal", "RolloutStarted")]


@pytest.mark.parametrize("stored", [None, "text", {}, {"conditions": 1}, {"observedGeneration": "1"}])
def test_a_status_of_another_shape_is_none(stored: Any) -> None:
    assert status.read(stored) is None
