"""The chart's router: off by default, least privilege, options that the router understands, and refusals by name."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, Helm, HelmError

from skiff_operator.settings import from_arguments
from skiff_router import policies
from skiff_router.config import DEFAULT_PORT, RouterConfig, add_arguments, read_single_key
from skiff_router.config import from_arguments as router_config
from skiff_router.limits import KeyLimits, read_limits
from skiff_runtime import contract

ON = "router.enabled=true"
KEYS = "router.apiKeysSecret.name=clients"
LIMITS = 'router.limits:={"default":{"requestsPerMinute":60},"keys":{"team-a":{"concurrency":null}}}'
ROUTER = "skiff-router"


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The helm program, without a cluster."""
    return Helm()


def added(helm: Helm, *values: str) -> dict[str, Any]:
    """The objects that the router brings, by kind."""
    before = {(each["kind"], each["metadata"]["name"]) for each in helm.render(*values)}
    objects = [
        each for each in helm.render(ON, *values) if (each["kind"], each["metadata"]["name"]) not in before
    ]
    found = {
        each["kind"]: each
        for each in objects
        if not each["metadata"]["name"].endswith(("-dashboard-router", "-peers"))
    }
    assert all(each["metadata"]["labels"]["app.kubernetes.io/name"] == ROUTER for each in found.values())
    return found


def pod(objects: dict[str, Any]) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


def config(objects: dict[str, Any], files: Path) -> RouterConfig:
    """The configuration of a router's container, whose mounted files are below ``files``."""
    (container,) = pod(objects)["containers"]
    assert container["command"] == ["skiff-router"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [word.replace("=/etc/skiff/", f"={files}/") for word in container["args"]]
    return router_config(parser.parse_args(words))


def test_there_is_no_router_by_default(helm: Helm) -> None:
    assert not [each for each in helm.render() if ROUTER in json.dumps(each["metadata"])]


def test_router_brings_what_it_needs_and_may_only_watch_and_ask_for_pods(helm: Helm, tmp_path: Path) -> None:
    objects = added(helm)
    assert sorted(objects) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    ]
    rules = {
        tuple(rule["resources"]): (rule["apiGroups"], rule["verbs"])
        for rule in objects["ClusterRole"]["rules"]
    }
    assert rules == {
        ("inferenceservices",): ([contract.API_GROUP], ["list", "watch"]),
        ("inferenceservices/scale",): ([contract.API_GROUP], ["patch"]),
        ("endpointslices",): (["discovery.k8s.io"], ["list", "watch"]),
    }
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    assert (
        subject["name"] == objects["ServiceAccount"]["metadata"]["name"] == pod(objects)["serviceAccountName"]
    )
    found = config(objects, tmp_path)
    assert found.kubernetes and found.namespaces == () and found.api_key_file is None
    assert (found.host, found.port) == ("0.0.0.0", DEFAULT_PORT)


def test_router_of_some_namespaces_has_roles_there(helm: Helm, tmp_path: Path) -> None:
    bodies = helm.render(ON, "watchNamespaces={a,b}")
    ours = [each for each in bodies if each["metadata"]["name"] == "skiff:skiff-system:skiff-router"]
    assert sorted((each["kind"], each["metadata"]["namespace"]) for each in ours) == [
        ("Role", "a"),
        ("Role", "b"),
        ("RoleBinding", "a"),
        ("RoleBinding", "b"),
    ]
    (deployment,) = [
        each for each in bodies if each["metadata"]["name"] == ROUTER and each["kind"] == "Deployment"
    ]
    assert config({"Deployment": deployment}, tmp_path).namespaces == ("a", "b")


def test_service_and_budget_select_the_routers_alone(helm: Helm) -> None:
    bodies = helm.render(ON, "replicas=2", "router.service.port=8081")
    by_kind = {(each["kind"], each["metadata"]["name"]): each for each in bodies}
    router = by_kind["Deployment", ROUTER]["spec"]
    operator = by_kind["Deployment", "skiff-operator"]["spec"]
    selector = router["selector"]["matchLabels"]
    assert selector.items() <= router["template"]["metadata"]["labels"].items()
    assert not selector.items() <= operator["template"]["metadata"]["labels"].items()
    assert not operator["selector"]["matchLabels"].items() <= router["template"]["metadata"]["labels"].items()
    service = by_kind["Service", ROUTER]["spec"]
    assert service["selector"] == selector
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(8081, "http")]
    assert by_kind["PodDisruptionBudget", ROUTER]["spec"]["selector"]["matchLabels"] == selector
    (spread,) = router["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == selector
    one = added(helm, "router.replicas=1")
    assert "PodDisruptionBudget" not in one and "topologySpreadConstraints" not in pod(one)


def test_pods_are_restricted_probed_and_drained(helm: Helm) -> None:
    spec = pod(added(helm, "router.drainTimeoutSeconds=120", 'imagePullSecrets:=[{"name":"registry"}]'))
    assert spec["securityContext"]["runAsNonRoot"] and spec["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] and container["resources"]["limits"]
    assert container["livenessProbe"]["httpGet"]["path"] == contract.PATH_LIVEZ
    assert container["readinessProbe"]["httpGet"]["path"] == contract.PATH_READYZ
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= pause + 120 + 10
    assert container["image"] == "ghcr.io/skiff-dev/operator:0.1.0"


def test_keys_and_limits_are_mounted_where_the_router_reads_them(helm: Helm, tmp_path: Path) -> None:
    values = [KEYS, LIMITS, "router.backendApiKeySecret.name=pods", "router.usageLog=true"]
    objects = added(helm, *values, "router.policy=round-robin", 'router.extraArgs:=["--max-connections=7"]')
    (container,) = pod(objects)["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod(objects)["volumes"]}
    assert mounts.keys() == volumes.keys() == {"keys", "backend-key", "limits"}
    assert (volumes["keys"]["secret"]["secretName"], volumes["backend-key"]["secret"]["secretName"]) == (
        "clients",
        "pods",
    )
    for name, content in (("keys/keys", "team-a: x\n"), ("backend-key/key", "y\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    ((file, text),) = objects["ConfigMap"]["data"].items()
    assert volumes["limits"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    (tmp_path / "limits").mkdir()
    (tmp_path / "limits" / file).write_text(text)
    found = config(objects, tmp_path)
    assert found.backend_api_key_file is not None
    assert read_single_key(found.backend_api_key_file, "--backend-api-key-file") == "y"
    assert (found.usage_log, found.policy, found.max_connections) == (
        "-",
        "round-robin",
        7,
    )
    (peers,) = found.peers
    service = next(each for each in helm.render(ON, *values) if each["metadata"]["name"] == f"{ROUTER}-peers")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert (
        service["spec"]["selector"].items()
        <= objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )
    namespace = service["metadata"]["namespace"]
    assert peers == (f"{service['metadata']['name']}.{namespace}.svc", container["ports"][0]["containerPort"])
    assert found.limits_file is not None
    limits = read_limits(found.limits_file, "--limits-file")
    assert limits.for_key("team-a") == KeyLimits(60, concurrency=None)
    assert limits.for_key("other").requests_per_minute == 60


def test_policies_are_those_of_the_router() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["router"]["properties"]
    assert sorted(schema["policy"]["enum"]) == sorted(policies.NAMES)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["router"]["policy"] == policies.NAMES[0], "the router's default"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (["router.enable=true"], "enable"),
        (["router.replicas=-1"], "replicas"),
        (["router.policy=random"], "policy"),
        (["router.service.type=ExternalName"], "type"),
        ([KEYS, 'router.limits:={"defaults":{}}'], "defaults"),
        ([KEYS, 'router.limits:={"default":{"requestsPerMinute":0}}'], "requestsPerMinute"),
        ([KEYS, 'router.limits:={"keys":{"a b":{}}}'], "a b"),
        ([ON, LIMITS], "router.apiKeysSecret.name"),
        ([ON, "router.backendApiKeySecret.name=pods"], "router.apiKeysSecret.name"),
        ([ON, "nameOverride=router"], "nameOverride"),
        ([ON, 'router.extraArgs:=["port=1"]'], "extraArgs"),
    ],
)
def test_wrong_value_is_refused_by_name(helm: Helm, values: list[str], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        helm.render(*values)


@pytest.mark.parametrize(
    ("values", "release", "name"),
    [
        ([], "skiff", "skiff-router"),
        (["fullnameOverride=serving"], "skiff", "serving-router"),
        (["nameOverride=controller"], "ai", "ai-router"),
        ([], "x" * 53, "x" * 41 + "-"),
    ],
)
def test_names_begin_with_the_releases(helm: Helm, values: list[str], release: str, name: str) -> None:
    values = [ON, KEYS, LIMITS, *values, "networkPolicy.enabled=true", "monitoring.podMonitors=true"]
    bodies = helm.render(*values, release=release)
    ours = [
        each["metadata"]["name"].removeprefix("skiff:skiff-system:")
        for each in bodies
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/name") == ROUTER
    ]
    assert len(ours) == 10 and len(set(ours)) == 2
    router, peers = sorted(set(ours), key=ours.count, reverse=True)
    assert router.startswith(name) and peers.startswith(name)
    assert len(router) <= 63 and len(peers) <= 63


def test_network_policy_lets_clients_in_and_the_router_to_pods_and_the_api_server(helm: Helm) -> None:
    assert "NetworkPolicy" not in added(helm)
    peers = '[{"namespaceSelector":{"matchLabels":{"team":"web"}}}]'
    policy = added(helm, "networkPolicy.enabled=true")["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == ROUTER
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    server, pods = policy["egress"]
    assert [port["port"] for port in server["ports"]] == [443, 6443]
    assert [port["port"] for port in pods["ports"]] == [contract.API_PORT]
    assert pods["to"][0]["podSelector"]["matchExpressions"][0]["key"] == contract.LABEL_SERVICE
    values = ["networkPolicy.enabled=true", f"router.clientsFrom:={peers}"]
    assert added(helm, *values)["NetworkPolicy"]["spec"]["ingress"][0]["from"] == json.loads(peers)
    policy = added(helm, *values, KEYS, LIMITS)["NetworkPolicy"]["spec"]
    replicas = {"podSelector": policy["podSelector"]}
    assert policy["ingress"][0]["from"] == [replicas, *json.loads(peers)], "they share the limits"
    names, others, *rest = policy["egress"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert others == {"ports": [{"port": "http", "protocol": "TCP"}], "to": [replicas]}
    assert rest == [server, pods]


def test_monitor_scrapes_the_router(helm: Helm) -> None:
    monitor = added(helm, "monitoring.podMonitors=true")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"]["app.kubernetes.io/name"] == ROUTER
    assert monitor["podMetricsEndpoints"][0]["path"] == contract.PATH_METRICS


@pytest.mark.parametrize(
    ("values", "exclusive"),
    [([ON], False), ([ON, "router.exclusive=true"], True), (["router.exclusive=true"], False)],
)
def test_operator_learns_that_the_router_is_exclusive(helm: Helm, values: list[str], exclusive: bool) -> None:
    """Without a router, no pod would accept anything."""
    (operator,) = [
        each
        for each in helm.render(*values)
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "skiff-operator")
    ]
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each.get("value", "given") for each in container["env"]}
    assert from_arguments([], environ).router_exclusive is exclusive
