"""The chart's PodMonitors and PrometheusRule on a real API server that has the Prometheus operator's own definitions."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer, Refused
from helm import Helm
from kube import tool
from operator_process import eventually
from services import service

from skiff_operator import plan
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.settings import Settings

GROUP = "/apis/monitoring.coreos.com/v1"
PLURALS = {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
VALUES = ("monitoring.podMonitors=true", "monitoring.rules=true", "monitoring.labels.release=prometheus")


@pytest.fixture(scope="module")
def definitions(server: ApiServer) -> None:
    """Install the definitions, and wait until they are served."""
    folder = Path(tool("prometheus-operator-crds-path"))
    for plural in PLURALS.values():
        server.install(folder / f"monitoring.coreos.com_{plural}.yaml")
        eventually(partial(server.is_served, f"{GROUP}/{plural}"), f"{plural} are served")


def rendered(*values: str) -> list[dict[str, Any]]:
    """The chart's objects."""
    return Helm().render(*VALUES, *values)


def create(api: ApiServer, body: dict[str, Any]) -> Any:
    """Create a monitoring object in the test's namespace, strictly: unknown fields are refused."""
    path = f"{GROUP}/namespaces/{api.namespace}/{PLURALS[body['kind']]}?fieldValidation=Strict"
    placed = {**body, "metadata": {**body["metadata"], "namespace": api.namespace}}
    return api.request("POST", path, placed)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a selector of equalities and Exists matches labels."""
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    return equal and all(
        each["operator"] == "Exists" and each["key"] in labels
        for each in selector.get("matchExpressions", [])
    )


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize(
    ("values", "monitors"), [((), 2), (("watchNamespaces={a,b}",), 2), (("router.enabled=true",), 3)]
)
def test_every_monitoring_object_is_accepted(api: ApiServer, values: tuple[str, ...], monitors: int) -> None:
    objects = [body for body in rendered(*values) if body["kind"] in PLURALS]
    assert [body["kind"] for body in objects].count("PodMonitor") == monitors
    for body in objects:
        live = create(api, body)
        assert live["spec"] == body["spec"] or body["kind"] == "PodMonitor"
        assert live["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("PodMonitor", ("podMetricsEndpoints", 0, "interval"), "15"),
        ("PodMonitor", ("podMetricsEndpoints", 0, "portName"), "http"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "for"), "soon"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "expression"), "up"),
    ],
)
def test_a_mistake_is_refused(api: ApiServer, kind: str, path: tuple[Any, ...], value: str) -> None:
    body = copy.deepcopy(next(body for body in rendered() if body["kind"] == kind))
    parent = body["spec"]
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(Refused, match=str(path[-1])):
        create(api, body)


@pytest.mark.integration
def test_the_monitors_select_the_pods_and_name_their_ports() -> None:
    """A monitor that selects nothing is accepted, too."""
    bodies = rendered("router.enabled=true")
    chosen = [body["spec"] for body in bodies if body["kind"] == "PodMonitor"]
    deployments = {body["metadata"]["name"]: body for body in bodies if body["kind"] == "Deployment"}
    operator, router = (deployments[f"skiff-{name}"]["spec"]["template"] for name in ("operator", "router"))
    serving = plan.objects(service(), Settings())[(DEPLOYMENT, "llama")]["spec"]["template"]
    found = []
    for template in (operator, serving, router):
        [monitor] = [spec for spec in chosen if selects(spec["selector"], template["metadata"]["labels"])]
        [endpoint] = monitor["podMetricsEndpoints"]
        ports = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
        assert endpoint["port"] in ports and endpoint["path"] == "/metrics"
        found.append(monitor)
    assert found[1]["namespaceSelector"] == {"any": True} and len({id(each) for each in found}) == 3
    [rule] = found[1]["podMetricsEndpoints"][0]["relabelings"]
    label = rule["sourceLabels"][0].removeprefix("__meta_kubernetes_pod_label_")
    assert label in {name.replace(".", "_").replace("/", "_") for name in serving["metadata"]["labels"]}
    assert rule["targetLabel"] == "inferenceservice"
