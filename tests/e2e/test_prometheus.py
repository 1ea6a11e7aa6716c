"""Dashboards and alerts against what a serving pod and the operator really expose, in a real Prometheus."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import alert_rules
from kube import Kube, inference_service, tool, wait
from prometheus import Prometheus, port_forward, running
from traffic_run import TrafficRun

from skiff_runtime.contract import (
    API_PORT,
    OPERATOR_METRICS_PORT,
    ROUTING_CACHE_INFO,
    ROUTING_QUEUED,
    ROUTING_RUNNING,
    ROUTING_USAGE,
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/skiff"
URL = "http://watched"
LOAD_SECONDS = 30
REQUESTS_PER_SECOND = 8
WINDOW = "60s"
STARTED = f'increase(skiff_operator_pod_startup_seconds_count{{phase="ready"}}[{WINDOW}]) > 0'
RECONCILED = f"increase(skiff_operator_reconcile_duration_seconds_count[{WINDOW}]) > 0"


def panels(dashboard: str) -> list[dict[str, Any]]:
    """Panels of one dashboard that query something."""
    loaded = json.loads((CHART / "dashboards" / f"{dashboard}.json").read_text())
    return [panel for panel in loaded["panels"] if panel.get("targets")]


def expressions(panel: dict[str, Any]) -> list[str]:
    """A panel's queries as Grafana would send them, with all namespaces and services chosen."""
    filled = []
    for target in panel["targets"]:
        text = target["expr"].replace("$__rate_interval", WINDOW)
        filled.append(text.replace("$namespace", ".*").replace("$service", ".*"))
    return filled


@pytest.fixture(scope="module")
def ports(kube: Kube, operator: Kube) -> Iterator[dict[str, tuple[int, dict[str, str]]]]:
    """Local ports into a serving pod and into the operator, with the labels that a PodMonitor would give."""
    kube.apply(inference_service("watched"))
    kube.wait_ready("watched")
    (pod,) = kube.list("pods", "serving.skiff.dev/inferenceservice=watched")
    name = pod["metadata"]["name"]
    labels = {"namespace": kube.namespace, "pod": name, "inferenceservice": "watched"}
    target = "deployment/skiff-operator"
    with (
        port_forward(kube, f"pod/{name}", API_PORT) as serving,
        port_forward(operator, target, OPERATOR_METRICS_PORT) as control,
    ):
        yield {"serving": (serving, labels), "operator": (control, {"namespace": operator.namespace})}
    kube.run("delete", "infsvc", "watched", "--timeout=60s")


@pytest.fixture(scope="module")
def prometheus(
    kube: Kube,
    client: str,
    ports: dict[str, tuple[int, dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """Prometheus after half a minute of load and a scale-out. It has seen the reconcile and the new pod's start."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump(alert_rules()))
    with running(folder, ports, rules) as server:
        run = TrafficRun(kube, client, name="watched")
        run.record(URL, "skiff-demo", "watched")
        run.start(URL, "skiff-demo", rate=REQUESTS_PER_SECOND, revisions=("watched",))
        time.sleep(LOAD_SECONDS)
        report = run.stop()
        assert report["failed"] == 0 and report["requests"] > 10, report
        kube.run("scale", "infsvc", "watched", "--replicas=2")
        # Machines with two cores are late with scrapes under load: only what two of them saw is a rate.
        wait(
            lambda: bool(server.query(RECONCILED) and server.query(STARTED)),
            timeout_seconds=60,
            explain=lambda: json.dumps(server.get("targets")["activeTargets"], indent=1),
        )
        yield server


def test_both_targets_are_up(prometheus: Prometheus) -> None:
    assert {sample["metric"]["job"]: sample["value"][1] for sample in prometheus.query("up")} == {
        "serving": "1",
        "operator": "1",
    }


@pytest.mark.parametrize("dashboard", ["serving", "operator"])
def test_every_panel_returns_data(prometheus: Prometheus, dashboard: str) -> None:
    empty = [
        (panel["title"], expression)
        for panel in panels(dashboard)
        for expression in expressions(panel)
        if not any(sample["value"][1] != "NaN" for sample in prometheus.query(expression))
    ]
    assert not empty, empty


def test_every_alert_rule_evaluates_and_a_healthy_service_raises_none(prometheus: Prometheus) -> None:
    """Not even a pending one; tests/operator/test_alerts.py has the series that raise them."""
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 30
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    raised = [each["labels"] for each in prometheus.get("alerts")["alerts"]]
    assert [labels for labels in raised if labels.get("service", "watched") == "watched"] == []


@pytest.mark.parametrize("job", ["serving", "operator"])
def test_promtool_accepts_the_exposition(ports: dict[str, tuple[int, dict[str, str]]], job: str) -> None:
    """All of it but the colons in the names of the routing gauges, which are the routers' choice, not ours."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[job][0]}/metrics", timeout=10) as response:
        page = response.read()
    done = subprocess.run(
        [tool("promtool-path"), "check", "metrics"], input=page, capture_output=True, check=False
    )
    complaints = (done.stderr + done.stdout).decode().splitlines()
    routing = [ROUTING_QUEUED, ROUTING_RUNNING, ROUTING_USAGE, ROUTING_CACHE_INFO] if job == "serving" else []
    assert sorted(complaints) == sorted(f"{name} metric names should not contain ':'" for name in routing)
    plain = b"".join(line for line in page.splitlines(keepends=True) if b"sglang:" not in line)
    subprocess.run([tool("promtool-path"), "check", "metrics"], input=plain, check=True)
