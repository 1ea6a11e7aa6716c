"""Chart, raw manifests, dashboards and rules agree with each other and with the names that the code defines."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, NAMESPACE, ROOT, Helm, hooks

import skiff_runtime
from skiff_operator.settings import Settings, from_arguments
from skiff_runtime import contract

CRDS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "manifests/crds").glob("*.yaml")}
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
ROUTER_METRICS = set(
    re.findall(r"^\| `(skiff_router_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
)
"""As tests/router/test_metrics.py compares them with the code."""
METRICS = ROUTER_METRICS | {
    value for name, value in vars(contract).items() if name.startswith(("METRIC_", "OPERATOR_", "ROUTING_"))
}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The helm program, without a cluster."""
    return Helm()


def by_name(bodies: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name, without what only Helm adds."""
    found = {}
    for body in bodies:
        labels = body["metadata"].get("labels", {})
        body["metadata"]["labels"] = {key: value for key, value in labels.items() if key not in HELM_LABELS}
        found[(body["kind"], body["metadata"]["name"])] = body
    return found


def raw_manifests() -> list[dict[str, Any]]:
    """Everything that manifests/kustomization.yaml names."""
    kustomization = yaml.safe_load((ROOT / "manifests/kustomization.yaml").read_text())
    paths = [ROOT / "manifests" / name for name in kustomization["resources"]]
    return [body for path in paths for body in yaml.safe_load_all(path.read_text())]


def test_the_chart_and_the_raw_manifests_agree(helm: Helm) -> None:
    """But for hooks: what they make, the CRD, is compared below."""
    raw = by_name(raw_manifests())
    raw.pop(("Namespace", NAMESPACE))  # helm's --create-namespace
    for crd in CRDS.values():
        raw.pop(("CustomResourceDefinition", crd["metadata"]["name"]))
    bodies = helm.render("monitoring.dashboards=false")
    assert by_name([body for body in bodies if body not in hooks(bodies)]) == raw


def test_the_chart_carries_the_same_crds(helm: Helm) -> None:
    for name in CRDS:
        assert (CHART / "files" / name).read_bytes() == (ROOT / "manifests/crds" / name).read_bytes()
    bodies = hooks(helm.render())
    (carried,) = [body for body in bodies if body["kind"] == "ConfigMap"]
    applied = {name.replace(".json", ".yaml"): json.loads(text) for name, text in carried["data"].items()}
    for crd in applied.values():
        assert crd["metadata"]["labels"].pop("app.kubernetes.io/version") == skiff_runtime.__version__
    assert applied == CRDS
    (job,) = [body for body in bodies if body["kind"] == "Job"]
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {word.removeprefix("/crd/") for word in words[3:]} == set(carried["data"])


@pytest.mark.parametrize(
    ("value", "titles"),
    [
        ("router.enabled=false", ["Skiff / Operator", "Skiff / Serving"]),
        ("router.enabled=true", ["Skiff / Operator", "Skiff / Router", "Skiff / Serving"]),
    ],
)
def test_grafana_finds_the_dashboards_of_what_runs(helm: Helm, value: str, titles: list[str]) -> None:
    bodies = helm.render(value)
    found = [body for body in bodies if body["kind"] == "ConfigMap" and body not in hooks(bodies)]
    assert {body["metadata"]["labels"]["grafana_dashboard"] for body in found} == {"1"}
    assert sorted(json.loads(text)["title"] for body in found for text in body["data"].values()) == titles


def test_no_rule_grants_everything_or_reads_secrets(helm: Helm) -> None:
    """The hook's role among them, which may change no other definition than ours.

    The operator makes one Secret in its own namespace, and reads that one alone.
    """
    roles = [body for body in helm.render("router.enabled=true") if body["kind"] in ("Role", "ClusterRole")]
    for role in roles:
        assert role["kind"] == "Role" or not any("secrets" in rule["resources"] for rule in role["rules"])
    for rule in [rule for role in roles for rule in role["rules"]]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"pods/log", "pods/exec"} & set(rule["resources"])
        if "secrets" in rule["resources"]:
            assert rule["resources"] == ["secrets"]
            assert rule["verbs"] == ["create"] or (rule["verbs"], rule["resourceNames"]) == (
                ["get"],
                ["skiff-operator-lora"],
            )
        if rule["resources"] == ["customresourcedefinitions"]:
            ours = [crd["metadata"]["name"] for _, crd in sorted(CRDS.items())]
            assert rule.get("resourceNames") == ours or rule["verbs"] == ["create"]


def test_the_operators_environment_is_understood() -> None:
    deployment = next(body for body in raw_manifests() if body["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    environ = {each["name"]: each.get("value", "given") for each in container["env"]}
    assert from_arguments([], environ) == Settings(lease_namespace="given", identity="given")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": contract.OPERATOR_METRICS_PORT, "health": contract.OPERATOR_HEALTH_PORT}


@pytest.mark.parametrize("path", sorted(CHART.glob("dashboards/*.json")), ids=lambda path: path.stem)
def test_panels_of_a_dashboard_have_ids_and_places_of_their_own(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: dict[tuple[int, int], dict[str, Any]] = {}
    for panel in panels:
        place = panel["gridPos"]
        for x, y in product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            other = cells.setdefault((x, y), panel)
            assert x < 24 and other is panel, f"{panel['title']} is over {other['title']}"


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
    """Name and query of every rule."""
    groups = yaml.safe_load((CHART / "rules/skiff.yaml").read_text())["groups"]
    return [
        (rule.get("alert") or rule["record"], rule["expr"]) for group in groups for rule in group["rules"]
    ]


RECORDED = {where for where, _ in rule_expressions() if ":" in where}


@pytest.mark.parametrize(("where", "expression"), [*dashboard_expressions(), *rule_expressions()])
def test_queries_use_only_defined_metrics(where: str, expression: str) -> None:
    names = set(re.findall(r"[a-zA-Z_:][\w:]*", expression))
    used = {name for name in names if re.match(r"(?:skiff|sglang|process)[_:]\w", name)} | (names & RECORDED)
    assert not {name for name in names - RECORDED if name.startswith("inferenceservice:")}
    assert used, f"{where} uses no metric of ours"
    for name in used:
        base = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        assert name in METRICS | PROCESS | RECORDED or base in METRICS, f"{where}: {name}"


def test_every_metric_of_operator_and_router_is_on_a_dashboard() -> None:
    text = " ".join(expression for _, expression in dashboard_expressions())
    names = [
        value for name, value in vars(contract).items() if name.startswith("OPERATOR_") and "PORT" not in name
    ]
    names += sorted(ROUTER_METRICS)
    assert len(names) > 20
    assert not [name for name in names if name not in text]
