"""Canaries: which revisions are held, how many pods they have, and their end, against a real API server and controllers."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from apiserver import ApiServer
from metrics_pages import MetricsPage, request_counts, served
from msgspec.structs import replace
from operator_checks import condition, place, revision
from operator_process import OperatorProcess, eventually
from play_kubelet import PlayKubelet

from skiff_operator import canary, spec
from skiff_operator.errors import InvalidSpec
from skiff_operator.revisions import Revision, Target, is_canary
from skiff_operator.rollout_analysis import Analysis, Figures
from skiff_operator.spec import Canary, CanaryHeader, InferenceService, RolloutPolicy

Start = Callable[..., OperatorProcess]
Skiff = Callable[..., tuple[int, str]]
POLICY = RolloutPolicy(canary=Canary(weight=25))
OLD = Revision(name="a-1", number=1, revision="old", base="old", spec_hash="1", operator_version="1")
TARGET = Target(name="a-2", revision="new", deployed="new", base="new", spec_hash="2", source="built")


def service(**fields: Any) -> InferenceService:
    policy = {"canary": {"weight": 25}, **fields}
    raw = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "rollout": policy}
    metadata = {"name": "a", "namespace": "n", "uid": "u", "generation": 2}
    return spec.parse({"metadata": metadata, "spec": raw})


def test_new_templates_alone_are_held() -> None:
    held = service()
    assert is_canary(held, TARGET, (OLD,), "old")
    assert not is_canary(service(canary=None), TARGET, (OLD,), "old")
    assert not is_canary(held, TARGET, (), ""), "the first revision of a service"
    assert not is_canary(held, TARGET, (OLD,), "new"), "the one that serves"
    assert not is_canary(held, replace(TARGET, failed="CrashLoop"), (OLD,), "old"), "rolled back"
    assert not is_canary(held, replace(TARGET, base="old"), (OLD,), "old"), "a restart"
    promoted = replace(OLD, name="a-2", revision="new", base="new", promoted="0 of 100 requests failed")
    assert not is_canary(held, TARGET, (OLD, promoted), "old"), "promoted before"
    assert not is_canary(replace(held, promoted_revision="new"), TARGET, (OLD,), "old")
    assert is_canary(replace(held, promoted_revision="other"), TARGET, (OLD,), "old")


@pytest.mark.parametrize(
    ("weight", "replicas", "pods"),
    [(1, 1, 1), (50, 1, 1), (99, 1, 1), (10, 10, 1), (25, 10, 3), (99, 10, 10)],
)
def test_canary_has_its_share_of_the_pods(weight: int, replicas: int, pods: int) -> None:
    policy = RolloutPolicy(canary=Canary(weight=weight))
    assert canary.count_pods(policy, replicas) == pods
    beside, instead = (canary.rolling_update(policy, replicas, replace=each) for each in (False, True))
    assert beside == {"maxSurge": pods, "maxUnavailable": 0}
    assert instead == {"maxSurge": 0, "maxUnavailable": pods}


BEGAN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:02:00Z"
PROVED = Analysis("RollingOut", Figures("new", 100, 5), Figures("old", 400, 0))


@pytest.mark.parametrize(
    ("policy", "analysis", "began", "promoted"),
    [
        (POLICY, PROVED, BEGAN, True),
        (POLICY, PROVED, "2026-01-01T00:01:01Z", False),
        (POLICY, PROVED, "", False),
        (POLICY, None, BEGAN, False),
        (POLICY, replace(PROVED, phase="Stopped"), BEGAN, False),
        (POLICY, replace(PROVED, candidate=Figures("new", 99, 0)), BEGAN, False),
        (POLICY, replace(PROVED, candidate=Figures("new", 100, 6)), BEGAN, False),
        (POLICY, Analysis("RollingOut", Figures("new", 100, 6), Figures("old", 400, 8)), BEGAN, True),
        (POLICY, replace(PROVED, baseline=Figures("old")), BEGAN, True),
        (replace(POLICY, paused=True), PROVED, BEGAN, False),
        (RolloutPolicy(canary=Canary(auto_promote=False)), PROVED, BEGAN, False),
        (RolloutPolicy(), PROVED, BEGAN, False),
    ],
    ids=[
        "proved", "too early", "no pod was ready", "no comparison", "its comparison was stopped", "few requests",
        "errors", "errors that the old one has", "an idle old one", "paused", "by hand", "no canary",
    ],
)  # fmt: skip
def test_promotion(policy: RolloutPolicy, analysis: Analysis | None, began: str, promoted: bool) -> None:
    assert bool(canary.promotion(policy, analysis, began, NOW)) == promoted


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (RolloutPolicy(canary=Canary(weight=0)), "weight: must be 1 to 99"),
        (RolloutPolicy(canary=Canary(min_seconds=-1)), "minSeconds"),
        (RolloutPolicy(canary=Canary(header=CanaryHeader("a b", "c"))), "header.name"),
        (RolloutPolicy(canary=Canary(header=CanaryHeader("Host", "c"))), "header.name"),
        (RolloutPolicy(canary=Canary(header=CanaryHeader("x-canary", "a\n"))), "header.value"),
        (
            replace(POLICY, analysis=spec.RolloutAnalysis(enabled=False)),
            "set it to false, or spec.rollout.analysis.enabled",
        ),
    ],
)
def test_contradictions_are_refused(policy: RolloutPolicy, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        canary.check(policy)
    canary.check(POLICY)


def create(api: ApiServer, **canary_fields: Any) -> tuple[PlayKubelet, str]:
    """Create a service of two pods with a canary of one, and serve it. Returns its kubelet and its revision."""
    policy = {"canary": {"weight": 30, "minSeconds": 0, **canary_fields}, "analysis": {"minRequests": 50}}
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"uri": "demo://"},
            "runtime": {"device": "cpu"},
            "replicas": 2,
            "rollout": policy,
        },
    }
    api.create("inferenceservices", body)
    kubelet = PlayKubelet(api, "llama")
    kubelet.serve(2)
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "ready")
    assert "canary" not in api.get("inferenceservices", "llama")["status"], "the first revision is none"
    return kubelet, revision(api)


def begin(api: ApiServer, kubelet: PlayKubelet, old: str, address: str = "") -> str:
    """Edit the spec, and let the canary's pod serve. Returns its revision."""
    api.merge("inferenceservices", "llama", {"spec": {"runtime": {"args": ["--max-running-requests=8"]}}})
    new = eventually(lambda: (found := revision(api)) != old and found, "another template")
    assert isinstance(new, str)
    [pod] = eventually(lambda: kubelet.pods(new), "the canary's pod") or []
    name = pod["metadata"]["name"]
    eventually(lambda: published(api).get("pods") == [name], "its pod is listed before it is ready")
    assert "startedAt" not in published(api)
    if address:
        place(api, name, address)
    kubelet.serve(1, new)
    eventually(lambda: condition(api, "Progressing") == ("True", "Canary"), "the canary serves")
    return new


def published(api: ApiServer) -> Any:
    """The canary in the status; empty without one."""
    return api.get("inferenceservices", "llama").get("status", {}).get("canary", {})


def is_replaced(api: ApiServer, kubelet: PlayKubelet, old: str, new: str) -> Callable[[], bool]:
    """Return a step of a rollout, which returns whether it has ended."""

    def step() -> bool:
        kubelet.serve(1, new)
        kubelet.remove_deleted()
        return not kubelet.pods(old) and len(kubelet.pods(new)) == 2 and not published(api)

    return step


FLAGS = ("--resync-seconds", "0.3", "--rollout-metrics-seconds", "0.2")


def test_canary_that_holds_is_promoted(api: ApiServer, start: Start, skiff: Skiff) -> None:
    """The operator that began it is gone by then, and so it is with the one that promotes it."""
    first = start("first", *FLAGS)
    first.start()
    page = MetricsPage(request_counts(0))
    with ExitStack() as stack:
        stack.enter_context(served("127.1.9.3", page))
        kubelet, old = create(api, header={"name": "X-Canary", "value": "yes"})
        new = begin(api, kubelet, old, "127.1.9.3")
        assert published(api)["header"] == {"name": "X-Canary", "value": "yes"}
        assert "weight" not in published(api)
        assert published(api)["startedAt"]
        first.stop()
        deployment = api.get("deployments", "llama")
        second = start("second", *FLAGS)
        second.start()
        page.text = request_counts(49)
        eventually(lambda: "0 of 49 requests failed" in skiff("status", "--no-watch")[1], "its figures")
        assert "50 are needed" in skiff("status", "--no-watch")[1]
        assert len(kubelet.pods(old)) == 2 and len(kubelet.pods(new)) == 1
        found = api.get("deployments", "llama")
        assert found["metadata"]["generation"] == deployment["metadata"]["generation"], (
            "a restart writes nothing"
        )
        assert found["spec"]["minReadySeconds"] == canary.HOLD_SECONDS
        page.text = request_counts(60)
        eventually(is_replaced(api, kubelet, old, new), "its revision replaces the old one")
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "it serves alone")
    [note] = [each["note"] for each in api.list("events") if each["reason"] == "CanaryPromoted"]
    assert (
        note
        == f"canary revision {new} is promoted: 0 of 60 requests failed, against 0 of 0 of revision {old}"
    )
    assert api.get("deployments", "llama")["spec"]["minReadySeconds"] == 2

    assert skiff("undo")[0] == 0
    eventually(is_replaced(api, kubelet, new, old), "a return to the old spec is no canary")


def test_canary_that_serves_worse_is_rolled_back(api: ApiServer, start: Start, skiff: Skiff) -> None:
    start("operator", *FLAGS).start()
    page = MetricsPage(request_counts(0))
    with ExitStack() as stack:
        stack.enter_context(served("127.1.9.5", MetricsPage(request_counts(400))))
        stack.enter_context(served("127.1.9.6", page))
        kubelet, old = create(api)
        for pod, address in zip(kubelet.pods(), ("127.1.9.5", "127.1.9.7"), strict=True):
            place(api, pod["metadata"]["name"], address)
        new = begin(api, kubelet, old, "127.1.9.6")
        assert published(api)["weight"] == 30
        page.text = request_counts(60, 20)
        eventually(
            lambda: "20 of 80 requests failed" in skiff("status", "--no-watch")[1], "a reading proves nothing"
        )
        assert revision(api) == new
        page.text = request_counts(90, 30)
        eventually(lambda: revision(api) == old, "the old template is back")
    eventually(lambda: not kubelet.pods(new), "the canary's pod is deleted")
    eventually(lambda: condition(api, "Ready") == ("False", "RolledBack"), "the status reports it")
    assert not published(api)
    assert len(kubelet.pods(old)) == 2, "no old pod was touched"


def test_canary_is_ended_by_hand(api: ApiServer, start: Start, skiff: Skiff) -> None:
    start("operator", *FLAGS).start()
    kubelet, old = create(api, autoPromote=False)
    assert "has no canary" in skiff("promote")[1]
    new = begin(api, kubelet, old)
    assert skiff("restart")[0] == 0
    assert skiff("undo") == (0, "inferenceservice/llama rolled back to revision 1\n")
    eventually(lambda: not kubelet.pods(new) and revision(api) == old, "the canary is gone")
    kubelet.remove_deleted()
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "the old revision serves")
    assert len(kubelet.pods(old)) == 2
    again = begin(api, kubelet, old)
    assert skiff("promote") == (0, "inferenceservice/llama promoted\n")
    eventually(is_replaced(api, kubelet, old, again), "it replaces the old revision")
    assert json.dumps(published(api)) == "{}"
