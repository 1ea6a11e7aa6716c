"""Canaries behind the router, under traffic: one that fares well is promoted, one that crashes is rolled back."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from helm import Helm
from kube import Kube, inference_service, wait
from router_in_cluster import URL, routers, upgrade
from traffic_reports import check_answers
from traffic_run import TrafficRun

NAME: Final = "canary"
MODEL: Final = "canary-model"
DEMO: Final = "canary-answers"
WEIGHT: Final = 30
RATE: Final = 8.0
SETTLE_SECONDS: Final = 240


@pytest.fixture(scope="module")
def traffic(kube: Kube, client: str, helm: Helm, operator: Kube) -> Iterator[TrafficRun]:
    """A driver with the right answers of a service of two pods, whose rollouts begin with a canary, behind two routers."""
    rollout = {
        "canary": {"weight": WEIGHT, "minSeconds": 20},
        "analysis": {"minRequests": 60, "observationSeconds": 0},
    }
    model = {"uri": "demo://", "name": MODEL}
    kube.apply(inference_service(NAME, model=model, replicas=2, rollout=rollout))
    kube.wait_ready(NAME)
    with helm.values_restored(namespace=operator.namespace):
        upgrade(helm, operator, "router.enabled=true")
        wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
        run = TrafficRun(kube, client, name="canary", port=8740)
        run.record(URL, MODEL, DEMO)
        yield run
    kube.run("delete", "infsvc", NAME, "--timeout=120s", timeout_seconds=150)


def edit(kube: Kube, *arguments: str) -> None:
    """Change the server's arguments."""
    patch = {"spec": {"runtime": {"args": arguments}}}
    kube.run("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps(patch))


def status(kube: Kube) -> dict[str, Any]:
    """The status of the service."""
    found: dict[str, Any] = (kube.get("infsvc", NAME) or {}).get("status", {})
    return found


def explain(kube: Kube) -> str:
    return json.dumps(status(kube), indent=1)


def choices(kube: Kube, client: str, operator: Kube) -> dict[str, float]:
    """The requests that the routers have sent to the canary and to the old revision."""
    found = {"canary": 0.0, "stable": 0.0}
    for address in routers(operator).values():
        page = kube.execute(client, "curl", "-sS", "--fail", f"{address}/metrics")
        pattern = rf'skiff_router_canary_choices_total{{model="{MODEL}",revision="(\w+)"}} (\S+)'
        for name, count in re.findall(pattern, page):
            found[name] += float(count)
    return found


@contextlib.contextmanager
def answered(traffic: TrafficRun, window: str) -> Iterator[None]:
    """Send requests for the length of a with-block, and check that all of them had the right answer."""
    traffic.start(URL, MODEL, rate=RATE, revisions=(DEMO,))
    try:
        traffic.mark(window)
        yield
    finally:
        report = traffic.stop()
    check_answers(report)


def test_canary_gets_its_share_and_is_promoted_without_a_failed_request(
    kube: Kube, client: str, operator: Kube, traffic: TrafficRun
) -> None:
    before = status(kube)["currentRevision"]
    with answered(traffic, "canary"):
        edit(kube, "--max-running-requests=8")
        wait(
            lambda: kube.condition(NAME, "Progressing").get("reason") == "Canary",
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: explain(kube),
        )
        shown = status(kube)
        assert shown["canary"]["weight"] == WEIGHT and len(shown["canary"]["pods"]) == 1, shown
        assert (shown["currentRevision"], shown["readyReplicas"]) == (before, 3), shown
        wait(
            lambda: kube.is_ready(NAME) and status(kube)["currentRevision"] != before,
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: explain(kube),
        )
        counted = choices(kube, client, operator)
    share = counted["canary"] / sum(counted.values())
    print(f"the canary got {share:.0%} of {sum(counted.values()):.0f} requests")
    # The driver has some 50 conversations: their share has a standard deviation of 7%.
    assert WEIGHT / 100 - 0.28 < share < WEIGHT / 100 + 0.28
    assert "canary" not in status(kube)
    [note] = [each["message"] for each in kube.list("events") if each["reason"] == "CanaryPromoted"]
    assert re.search(r"0 of \d+ requests failed, against 0 of \d+ of revision", note), note


def test_canary_that_crashes_is_rolled_back_and_no_client_sees_it(kube: Kube, traffic: TrafficRun) -> None:
    before = status(kube)["currentRevision"]
    with answered(traffic, "crashing canary"):
        edit(kube, "--max-running-requests=0")
        wait(
            lambda: kube.condition(NAME, "Degraded").get("reason") == "RolledBack",
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: explain(kube),
        )
    shown = status(kube)
    assert (shown["currentRevision"], shown["readyReplicas"]) == (before, 2), shown
    assert "CrashLoop" in kube.condition(NAME, "Ready")["message"]
