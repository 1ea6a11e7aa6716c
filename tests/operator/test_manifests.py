"""Chart, raw manifests, dashboards and rules agree with each other and with the names that the code defines."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from skiff_operator.settings import Settings, from_arguments
from skiff_runtime import contract

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/skiff"
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
METRICS = {
    value for name, value in vars(contract).items() if name.startswith(("METRIC_", "OPERATOR_", "ROUTING_"))
}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="session")
def helm() -> str:
    """The helm program: on PATH, or built by the test cluster's tools."""
    command = [sys.executable, str(ROOT / "tests/cluster/cluster.py"), "helm-path"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def render(helm: str, *values: str) -> list[dict[str, Any]]:
    """The chart's objects as release `skiff` in namespace `skiff-system`."""
    sets = [word for value in values for word in ("--set", value)]
    command = [helm, "template", "skiff", str(CHART), "--namespace", "skiff-system", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def by_name(bodies: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name, without what only Helm adds."""
    found = {}
    for body in bodies:
        labels = body["metadata"].get("labels", {})
        body["metadata"]["labels"] = {key: value for key, value in labels.items() if key not in HELM_LABELS}
        annotations = body["metadata"].get("annotations", {})
        if annotations.pop("helm.sh/resource-policy", None):
            body["metadata"].pop("annotations")
        found[(body["kind"], body["metadata"]["name"])] = body
    return found


def raw_manifests() -> list[dict[str, Any]]:
    """Everything that manifests/kustomization.yaml names."""
    kustomization = yaml.safe_load((ROOT / "manifests/kustomization.yaml").read_text())
    paths = [ROOT / "manifests" / name for name in kustomization["resources"]]
    return [body for path in paths for body in yaml.safe_load_all(path.read_text())]


def test_the_chart_and_the_raw_manifests_agree(helm: str) -> None:
    raw = by_name(raw_manifests())
    raw.pop(("Namespace", "skiff-system"))  # helm's --create-namespace
    assert by_name(render(helm, "monitoring.dashboards=false")) == raw


def test_the_chart_carries_the_same_crd() -> None:
    copy = CHART / "files/inferenceservices.yaml"
    assert copy.read_bytes() == (ROOT / "manifests/crds/inferenceservices.yaml").read_bytes()


def test_a_wrong_value_is_refused(helm: str) -> None:
    command = [helm, "template", "skiff", str(CHART), "--set", "replica=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "replica" in done.stderr


def test_every_option_renders(helm: str) -> None:
    values = ["monitoring.podMonitors=true", "monitoring.rules=true", "watchNamespaces={a,b}", "replicas=2"]
    bodies = render(helm, *values)
    found = by_name(bodies)
    assert ("PodMonitor", "skiff-serving") in found and ("PrometheusRule", "skiff-operator") in found
    roles = [body["metadata"]["namespace"] for body in bodies if body["kind"] == "Role"]
    assert sorted(roles) == ["a", "b", "skiff-system"]
    assert not [kind for kind, _ in found if kind.startswith("Cluster")]
    rules = yaml.safe_load((CHART / "rules/skiff.yaml").read_text())
    assert found[("PrometheusRule", "skiff-operator")]["spec"] == rules


def test_grafana_finds_both_dashboards(helm: str) -> None:
    found = [body for body in render(helm) if body["kind"] == "ConfigMap"]
    assert {body["metadata"]["labels"]["grafana_dashboard"] for body in found} == {"1"}
    titles = [json.loads(text)["title"] for body in found for text in body["data"].values()]
    assert sorted(titles) == ["Skiff / Operator", "Skiff / Serving"]


def test_no_rule_grants_everything_or_reads_secrets() -> None:
    roles = [body for body in raw_manifests() if body["kind"] in ("Role", "ClusterRole")]
    for rule in [rule for role in roles for rule in role["rules"]]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"secrets", "pods/log", "pods/exec"} & set(rule["resources"])


def test_the_operators_environment_is_understood() -> None:
    deployment = next(body for body in raw_manifests() if body["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    environ = {each["name"]: each.get("value", "given") for each in container["env"]}
    assert from_arguments([], environ) == Settings(lease_namespace="given", identity="given")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": contract.OPERATOR_METRICS_PORT, "health": contract.OPERATOR_HEALTH_PORT}


def dashboard_expressions() -> list[tuple[str, str]]:
    """Title and query of every panel, and of every variable."""
    found = []
    for path in sorted(CHART.glob("dashboards/*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found.append((variable["name"], variable["definition"]))
    return found


def rule_expressions() -> list[tuple[str, str]]:
    """Name and query of every alert."""
    groups = yaml.safe_load((CHART / "rules/skiff.yaml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expression"), [*dashboard_expressions(), *rule_expressions()])
def test_queries_use_only_defined_metrics(where: str, expression: str) -> None:
    used = set(re.findall(r"\b(?:skiff|sglang|process)[_:]\w+", expression))
    assert used, f"{where} uses no metric of ours"
    for name in used:
        base = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        assert name in METRICS | PROCESS or base in METRICS, f"{where}: {name}"


def test_every_operator_metric_is_on_a_dashboard() -> None:
    text = " ".join(expression for _, expression in dashboard_expressions())
    names = [
        value for name, value in vars(contract).items() if name.startswith("OPERATOR_") and "PORT" not in name
    ]
    assert not [name for name in names if name not in text]
