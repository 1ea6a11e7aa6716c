"""Traffic through the router while all behind it changes, down to no pod at all: no request fails, and every answer is right.

`make traffic-router` repeats each change until `SKIFF_TEST_TRAFFIC_REQUESTS` requests were sent in sum, half of them while the number of pods
follows the load. Only where a router is deleted by force may requests fail, and then only those that it had.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any, Final

import pytest
from helm import Helm
from kube import Kube, inference_service, wait
from router_in_cluster import ROUTER, URL, routers, upgrade
from traffic import Failure
from traffic_reports import Report, check, publish, recorded, save
from traffic_run import TrafficRun

NAME: Final = "router-traffic"
MODEL: Final = "router-traffic-model"
PODS: Final = f"serving.skiff.dev/inferenceservice={NAME}"
ANSWERS: Final = "router-traffic-answers"
RUNTIME: Final = {
    "device": "cpu",
    "dtype": "float32",
    "env": [{"name": "SKIFF_CPU_THREADS", "value": "1"}],
}
TOTAL_REQUESTS: Final = int(os.environ.get("SKIFF_TEST_TRAFFIC_REQUESTS", "0"))
RATE: Final = float(os.environ.get("SKIFF_TEST_TRAFFIC_RATE", "10"))
REPORTS: Final = os.environ.get("SKIFF_TEST_TRAFFIC_REPORTS", "")
SHARES: Final = {
    "autoscaling": 0.5,
    "rollout": 0.12,
    "scaling": 0.12,
    "zero": 0.14,
    "routers": 0.08,
    "router killed": 0.04,
}
"""Parts of all requests."""
SETTLE_SECONDS: Final = 240.0
IDLE_SECONDS: Final = 5
MOST_PODS: Final = 4
BURST_REQUESTS: Final = 250
"""Least requests after each return from zero pods."""
NOTICE_SECONDS: Final = 15.0
"""Time after the end of a router within which its requests fail, the command itself included."""


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Report]]:
    """The reports of all tests by name; printed as a table at the end, which REPORTS/router-traffic.md gets as well."""
    collected: dict[str, Report] = {}
    yield collected
    publish(collected, REPORTS, "router-traffic.md")


@pytest.fixture(scope="module")
def routed(kube: Kube, client: str, helm: Helm, operator: Kube) -> Iterator[str]:
    """A service behind two routers, and the right answers of its model, recorded in the client pod."""
    with helm.values_restored(namespace=operator.namespace):
        upgrade(helm, operator, "router.enabled=true", "router.drainTimeoutSeconds=30")
        wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
        model = {"uri": "demo://", "name": MODEL}
        kube.apply(inference_service(NAME, model=model, runtime=RUNTIME, replicas=1))
        kube.wait_ready(NAME)
        TrafficRun(kube, client, name="router-traffic", port=8750).record(URL, MODEL, ANSWERS)
        yield client
        kube.run("delete", "infsvc", NAME, "--timeout=120s", timeout_seconds=150)


@contextlib.contextmanager
def traffic(kube: Kube, client: str, name: str, reports: dict[str, Report]) -> Iterator[TrafficRun]:
    """Send requests for the length of a with-block, some seconds before and after included; add the report to `reports`."""
    run = TrafficRun(kube, client, name=name.replace(" ", "-").replace(",", ""), port=8750)
    run.start(URL, MODEL, rate=RATE, revisions=(ANSWERS,))
    with recorded(run, name, reports, REPORTS, file_name=f"router, {name}"):
        yield run


def share(name: str) -> int:
    """Return the number of requests that a test shall send."""
    return math.ceil(TOTAL_REQUESTS * SHARES[name])


def patch(kube: Kube, **spec: Any) -> None:
    """Change fields of the service's spec; None removes one."""
    kube.run("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def status(kube: Kube) -> dict[str, Any]:
    """The status of the service."""
    found: dict[str, Any] = (kube.get("infsvc", NAME) or {}).get("status", {})
    return found


def wait_for_pods(kube: Kube, count: int) -> None:
    """Wait until this number of pods serves, and every other pod is gone."""

    def settled() -> bool:
        ready = status(kube).get("readyReplicas", 0) == count
        return ready and kube.is_ready(NAME) and len(kube.list("pods", PODS)) == count

    wait(settled, timeout_seconds=SETTLE_SECONDS, explain=lambda: json.dumps(status(kube), indent=1))


@pytest.mark.traffic
def test_rollouts(kube: Kube, routed: str, reports: dict[str, Report]) -> None:
    with traffic(kube, routed, "rollout", reports) as run:
        for number in run.rounds(share("rollout")):
            run.mark("rollout")
            before = status(kube)["currentRevision"]
            patch(kube, runtime={"args": [f"--max-running-requests={64 + number}"]})
            wait(
                lambda: status(kube)["currentRevision"] != before,  # noqa: B023 (it is called within the round)
                timeout_seconds=SETTLE_SECONDS,
            )
            wait_for_pods(kube, 1)
    check(reports["rollout"])


@pytest.mark.traffic
def test_scaling_out_and_in(kube: Kube, routed: str, reports: dict[str, Report]) -> None:
    with traffic(kube, routed, "scaling", reports) as run:
        for _ in run.rounds(share("scaling")):
            for window, count in (("scaling out", 2), ("scaling in", 1)):
                run.mark(window)
                kube.run("scale", "infsvc", NAME, f"--replicas={count}")
                wait_for_pods(kube, count)
    check(reports["scaling"])


@pytest.mark.traffic
def test_number_of_pods_follows_the_load(kube: Kube, routed: str, reports: dict[str, Report]) -> None:
    """From one pod to four and back: the load stays, and the number of requests that a pod shall have changes."""

    def autoscale(target: float) -> None:
        policy = {"maxReplicas": MOST_PODS, "scaleDownDelaySeconds": 5, "targets": {"ttftSeconds": target}}
        patch(kube, autoscaling={"minReplicas": 1, **policy})

    try:
        with traffic(kube, routed, "autoscaling", reports) as run:
            for _ in run.rounds(share("autoscaling")):
                run.mark("to four pods")
                autoscale(0.001)
                wait(
                    lambda: status(kube).get("readyReplicas", 0) == MOST_PODS,
                    timeout_seconds=SETTLE_SECONDS,
                    explain=lambda: json.dumps(status(kube), indent=1),
                )
                run.mark("to one pod")
                autoscale(600)
                wait_for_pods(kube, 1)
    finally:
        patch(kube, autoscaling=None, replicas=1)
        wait_for_pods(kube, 1)
    check(reports["autoscaling"])


@pytest.mark.traffic
def test_to_zero_and_back(kube: Kube, routed: str, reports: dict[str, Report]) -> None:
    """Whenever no pod is left, traffic begins at once at its full rate; its first requests wait for a pod."""
    wanted = share("zero")
    policy = {"minReplicas": 0, "maxReplicas": 1, "scaleDownDelaySeconds": 5, "targets": {"concurrency": 256}}
    patch(kube, autoscaling={**policy, "scaleToZeroAfterSeconds": IDLE_SECONDS})
    sent = number = 0
    try:
        while number == 0 or sent < wanted:
            wait_for_pods(kube, 0)
            name = f"zero, {number}"
            run = TrafficRun(kube, routed, name=f"zero-{number}", port=8750)
            run.start(URL, MODEL, rate=RATE, revisions=(ANSWERS,))
            report = run.stop(at_least=max(BURST_REQUESTS, min(2000, wanted - sent)))
            reports[name] = report
            save(f"router, {name}", report, REPORTS)
            check(report)
            sent, number = sent + report["requests"], number + 1
    finally:
        patch(kube, autoscaling=None, replicas=1)
        wait_for_pods(kube, 1)


@pytest.mark.traffic
def test_rollouts_of_the_routers_and_of_the_operator(
    kube: Kube, operator: Kube, routed: str, reports: dict[str, Report]
) -> None:
    with traffic(kube, routed, "routers", reports) as run:
        for _ in run.rounds(share("routers")):
            for name in (ROUTER, "skiff-operator"):
                run.mark(f"rollout of {name}")
                operator.run("rollout", "restart", f"deployment/{name}")
                operator.run("rollout", "status", f"deployment/{name}", "--timeout=180s", timeout_seconds=210)
            wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
    check(reports["routers"])


@pytest.mark.traffic
def test_killed_routers_lose_only_their_own_requests(
    kube: Kube, operator: Kube, routed: str, reports: dict[str, Report]
) -> None:
    moments: list[float] = []
    with traffic(kube, routed, "router killed", reports) as run:
        for _ in run.rounds(share("router killed")):
            for name in sorted(routers(operator)):
                run.mark("router killed")
                moments.append(run.report()["seconds"])
                operator.run("delete", "pod", name, "--grace-period=0", "--force")
                wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
    report = reports["router killed"]
    check(report, failures={Failure.CONNECT, Failure.BEFORE, Failure.AFTER})
    for error in report["errors"]:
        failed_at = error["at_seconds"] + error["after_seconds"]
        assert any(0 < failed_at - moment < NOTICE_SECONDS for moment in moments), (moments, error)
