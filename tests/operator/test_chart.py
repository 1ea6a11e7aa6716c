"""The chart's values: what each of them makes, and that a wrong one is refused by name."""

import json
from typing import Any

import pytest
from helm import Helm, HelmError, hooks

from skiff_operator.resources.metadata import FETCHER as FETCHER_NAME
from skiff_operator.settings import Settings, from_arguments
from skiff_runtime import contract

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The helm program, without a cluster."""
    return Helm()


def of_kind(bodies: list[Any], kind: str) -> list[Any]:
    """The objects of one kind, without hooks."""
    return [body for body in bodies if body["kind"] == kind and body not in hooks(bodies)]


def pod(bodies: list[Any]) -> Any:
    """The spec of the operator's pods."""
    (deployment,) = of_kind(bodies, "Deployment")
    return deployment["spec"]["template"]["spec"]


def chart_pods(bodies: list[Any]) -> list[Any]:
    """The specs of all pods that the chart makes: the operator's and the hooks'."""
    templates = [body["spec"]["template"] for body in bodies if body["kind"] in ("Deployment", "Job")]
    return [each["spec"] for each in [*templates, *(body for body in bodies if body["kind"] == "Pod")]]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replica=2", "replica"),
        ("crd.keep=true", "keep"),
        ("image.digest=0123", "digest"),
        ("image.tag=a@b", "tag"),
        ('imagePullSecrets:=["registry"]', "imagePullSecrets"),
        ('runtimeImage.pullSecrets:=[{"name":"A_B"}]', "pullSecrets"),
        ('extraArgs:=["workers=2"]', "extraArgs"),
        ('extraEnv:=[{"name":"SKIFF_OPERATOR_NAMESPACES","value":"a"}]', "extraEnv"),
        ('watchNamespaces:=["A"]', "watchNamespaces"),
        ("podDisruptionBudget.maxUnavailable=half", "maxUnavailable"),
        ('networkPolicy.apiServer.cidrs:=["10.0.0.1"]', "cidrs"),
        ("networkPolicy.apiServer.ports:=[]", "ports"),
        ("fullnameOverride=Skiff", "fullnameOverride"),
        (f"nameOverride={'n' * 41}", "nameOverride"),
        ("rbac.aggregate=true", "aggregate"),
        ("upgrade.policy=Auto", "policy"),
        ("upgrade.maxUnavailable=0", "maxUnavailable"),
        ("modelCache.enable=true", "enable"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Helm, value: str, named: str) -> None:
    with pytest.raises(HelmError, match=named):
        helm.render(value)


def test_monitoring_and_namespaces(helm: Helm) -> None:
    values = ["monitoring.podMonitors=true", "monitoring.rules=true", "watchNamespaces={a,b}"]
    bodies = helm.render(*values)
    names = {(body["kind"], body["metadata"]["name"]) for body in bodies}
    assert {("PodMonitor", "skiff-operator"), ("PodMonitor", "skiff-operator-serving")} <= names
    roles = [body["metadata"]["namespace"] for body in of_kind(bodies, "Role")]
    assert sorted(roles) == ["a", "b", "skiff-system"]
    assert not of_kind(bodies, "ClusterRoleBinding")
    (rule,) = of_kind(bodies, "PrometheusRule")
    assert "${" not in json.dumps(rule["spec"])  # tests/operator/test_alerts.py has what it says


def test_model_caches_bring_their_rights_and_need_all_namespaces(helm: Helm) -> None:
    bodies = helm.render("modelCache.enabled=true", "modelCache.chownHostPath=false")
    before = helm.render()
    added = {body["metadata"]["name"] for body in bodies} - {body["metadata"]["name"] for body in before}
    policy = "skiff-operator.skiff-system.model-caches.serving.skiff.dev"
    assert added == {"skiff-operator-fetchers", policy}
    rules = [rule for body in of_kind(bodies, "ClusterRole") for rule in body["rules"]]
    (volumes,) = [rule["verbs"] for rule in rules if rule["resources"] == ["persistentvolumes"]]
    assert volumes == ["list", "create", "delete"]
    assert not [rule for rule in rules if "secrets" in rule["resources"]], "Secrets of its own namespace only"
    environ = {each["name"]: each.get("value", "x") for each in pod(bodies)["containers"][0]["env"]}
    settings = from_arguments([], environ)
    assert settings.model_caches and not settings.model_cache_chown
    with pytest.raises(HelmError, match="empty watchNamespaces"):
        helm.render("modelCache.enabled=true", "watchNamespaces={a}")


def test_rights_to_other_autoscaling_engines_come_with_them(helm: Helm) -> None:
    def groups(*values: str) -> set[str]:
        rules = [rule for body in of_kind(helm.render(*values), "ClusterRole") for rule in body["rules"]]
        return {group for rule in rules for group in rule["apiGroups"]} & {"autoscaling", "keda.sh"}

    assert groups() == set()
    assert groups("autoscaling.engines={HPA}") == {"autoscaling"}
    assert groups("autoscaling.engines={HPA,KEDA}") == {"autoscaling", "keda.sh"}
    with pytest.raises(HelmError, match="engines"):
        helm.render("autoscaling.engines={VPA}")


def test_rights_to_inference_pools_come_with_them(helm: Helm) -> None:
    def granted(*values: str) -> dict[str, list[str]]:
        rules = [rule for body in of_kind(helm.render(*values), "ClusterRole") for rule in body["rules"]]
        return {
            name: rule["verbs"]
            for rule in rules
            for name in rule["resources"]
            if ".networking." in rule["apiGroups"][0]
        }

    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    assert granted() == {}
    assert granted("inferencePools.enabled=true") == {"inferencepools": verbs, "httproutes": verbs}
    environ = {each["name"]: each.get("value", "x") for each in pod(helm.render())["containers"][0]["env"]}
    assert not from_arguments([], environ).inference_pools
    bodies = helm.render("inferencePools.enabled=true")
    environ = {each["name"]: each.get("value", "x") for each in pod(bodies)["containers"][0]["env"]}
    assert from_arguments([], environ).inference_pools


def test_the_digest_wins_over_the_tag(helm: Helm) -> None:
    bodies = helm.render("image.repository=registry.example.com/op", "image.tag=7", f"image.digest={DIGEST}")
    images = {each["image"] for spec in chart_pods(bodies) for each in spec["containers"]}
    assert images == {f"registry.example.com/op@{DIGEST}"}


@pytest.mark.parametrize("tag", ["7", "20261231", "v1.2"])
def test_a_tag_of_digits_is_a_tag(helm: Helm, tag: str) -> None:
    """`--set image.tag=7` gives a number, and a large one must not be printed with an exponent."""
    for value in (f"image.tag={tag}", f"image.tag:={tag if tag.isdigit() else json.dumps(tag)}"):
        assert pod(helm.render(value))["containers"][0]["image"] == f"ghcr.io/skiff-dev/operator:{tag}"


def test_every_pod_of_the_chart_goes_where_it_may(helm: Helm) -> None:
    """Hooks, too: one that cannot be pulled or placed would block an installation."""
    values = ['imagePullSecrets:=[{"name":"registry"}]', "nodeSelector.pool=system", "priorityClassName=high"]
    specs = chart_pods(helm.render(*values, 'tolerations:=[{"operator":"Exists"}]'))
    assert len(specs) == 3
    for spec in specs:
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["nodeSelector"] == {"pool": "system"} and spec["tolerations"] == [{"operator": "Exists"}]
        assert spec["priorityClassName"] == "high"
        assert spec["securityContext"]["runAsNonRoot"] and spec["containers"][0]["resources"]["limits"]


def test_arguments_and_environment_reach_the_operator(helm: Helm) -> None:
    values = [
        'extraArgs:=["--resync-seconds=60"]',
        'extraEnv:=[{"name":"HTTPS_PROXY","value":"http://egress.example.com"}]',
    ]
    secrets = 'runtimeImage.pullSecrets:=[{"name":"one"},{"name":"two"}]'
    values += ["upgrade.policy=Waves", "upgrade.maxUnavailable=3"]
    (container,) = pod(helm.render(*values, secrets))["containers"]
    environ = {each["name"]: each.get("value", "given") for each in container["env"]}
    assert environ["HTTPS_PROXY"] == "http://egress.example.com"
    settings = from_arguments(container["args"], environ)
    assert (settings.upgrade_policy, settings.upgrade_max_unavailable) == ("Waves", 3)
    assert settings.resync_seconds == 60 and settings.default_image_pull_secrets == ("one", "two")


def test_what_the_chart_sets_cannot_be_set_twice(helm: Helm) -> None:
    """Two variables of one name are refused by a server-side apply, long after the values were checked."""
    (container,) = pod(helm.render())["containers"]
    for each in container["env"]:
        with pytest.raises(HelmError, match="extraEnv"):
            helm.render(f'extraEnv:=[{{"name":"{each["name"]}","value":""}}]')


def test_replicas_are_spread_and_evicted_one_at_a_time(helm: Helm) -> None:
    one, two = helm.render(), helm.render("replicas=2")
    assert not of_kind(one, "PodDisruptionBudget") and "topologySpreadConstraints" not in pod(one)
    (budget,) = of_kind(two, "PodDisruptionBudget")
    (deployment,) = of_kind(two, "Deployment")
    selector = deployment["spec"]["selector"]
    assert budget["spec"]["maxUnavailable"] == 1 and budget["spec"]["selector"] == selector
    (spread,) = pod(two)["topologySpreadConstraints"]
    assert spread["labelSelector"] == selector and spread["whenUnsatisfiable"] == "ScheduleAnyway"
    own = '[{"maxSkew":2,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]'
    bodies = helm.render(
        "replicas=2", f"topologySpreadConstraints:={own}", "podDisruptionBudget.enabled=false"
    )
    assert [each["maxSkew"] for each in pod(bodies)["topologySpreadConstraints"]] == [2]
    assert not of_kind(bodies, "PodDisruptionBudget")


def test_the_network_policy_names_the_operators_ports_and_the_api_servers(helm: Helm) -> None:
    assert not of_kind(helm.render(), "NetworkPolicy")
    peers = '[{"namespaceSelector":{"matchLabels":{"name":"monitoring"}}}]'
    values = ["networkPolicy.enabled=true", 'networkPolicy.apiServer.cidrs:=["10.0.0.1/32"]']
    bodies = helm.render(*values, f"networkPolicy.metricsFrom:={peers}")
    (policy,) = of_kind(bodies, "NetworkPolicy")
    labels = of_kind(bodies, "Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    health, metrics = policy["spec"]["ingress"]
    named = {port["name"] for port in pod(bodies)["containers"][0]["ports"]}
    assert {health["ports"][0]["port"], metrics["ports"][0]["port"]} == named == {"health", "metrics"}
    (test,) = [body for body in bodies if body["kind"] == "Pod"]
    assert metrics["from"][0]["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()
    assert metrics["from"][1]["namespaceSelector"] and "from" not in health
    dns, server, serving = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and "to" not in dns
    assert [port["port"] for port in server["ports"]] == [443, 6443]
    assert server["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert [port["port"] for port in serving["ports"]] == [contract.API_PORT]
    assert serving["to"][0]["podSelector"]["matchExpressions"][0]["key"] == contract.LABEL_SERVICE
    (policy,) = of_kind(helm.render(*values, "modelCache.enabled=true"), "NetworkPolicy")
    fetchers = policy["spec"]["egress"][3]
    assert [port["port"] for port in fetchers["ports"]] == [contract.PEER_PORT]
    labels = fetchers["to"][0]["podSelector"]["matchLabels"]
    (name,) = labels.values()
    assert labels == {contract.LABEL_NAME: name} and name == FETCHER_NAME


def test_no_selector_of_the_operator_matches_a_hook(helm: Helm) -> None:
    """A Service that did would send a scrape to the pod of `helm test`, and a Deployment would adopt it."""
    bodies = helm.render()
    selector = of_kind(bodies, "Service")[0]["spec"]["selector"]
    assert selector == of_kind(bodies, "Deployment")[0]["spec"]["selector"]["matchLabels"]
    for hook in hooks(bodies):
        for labels in (
            hook["metadata"]["labels"],
            hook.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}),
        ):
            assert not selector.items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([], "skiff-operator"),
        (["nameOverride=controller"], "skiff-controller"),
        (["fullnameOverride=serving"], "serving"),
    ],
)
def test_names_are_overridden_together(helm: Helm, values: list[str], name: str) -> None:
    bodies = helm.render(*values, "replicas=2", "networkPolicy.enabled=true", "monitoring.podMonitors=true")
    for body in bodies:
        assert body["metadata"]["name"].removeprefix("skiff:skiff-system:").startswith(name), body["metadata"]
    environ = {each["name"]: each.get("value") for each in pod(bodies)["containers"][0]["env"]}
    assert environ["SKIFF_OPERATOR_LEASE_NAME"] == name
    named = [rule for body in of_kind(bodies, "Role") for rule in body["rules"] if "resourceNames" in rule]
    assert [rule["resourceNames"] for rule in named] == [[name], [f"{name}-lora"]]


def test_names_that_must_change_stay_distinct_and_valid(helm: Helm) -> None:
    """Helm allows dots, a leading digit and 53 characters in a release's name; a Service allows none of them."""
    releases = ["a.b", "a-b", "1a", "x" * 53, "x" * 52 + "y", "skiff-1a", "a" * 41]
    found = {}
    for release in releases:
        bodies = helm.render(release=release)
        for body in bodies:
            if not body["kind"].startswith("Cluster"):
                assert len(body["metadata"]["name"]) <= 63 + 7 * (body["kind"] == "ConfigMap")
        (service,) = of_kind(bodies, "Service")
        name = service["metadata"]["name"]
        assert name[0].isalpha() and "." not in name and "--" not in name
        found[name] = release
    assert len(found) == len(releases)


def test_a_cluster_wide_name_holds_namespace_and_release_unambiguously(helm: Helm) -> None:
    placed = [
        ("b-c", "a"),
        ("c", "a-b"),
        ("b-c", "a-b"),
        ("c", "a"),
        ("x" * 53, "n" * 63),
        ("x" * 52 + "y", "n" * 63),
    ]
    names = []
    for release, namespace in placed:
        bodies = helm.render(release=release, namespace=namespace)
        names += [body["metadata"]["name"] for body in bodies if body["kind"] == "ClusterRole"]
    assert len(names) == 4 * len(placed) == len(set(names))
    assert max(map(len, names)) <= 253


def test_settings_are_the_defaults_where_values_are(helm: Helm) -> None:
    (container,) = pod(helm.render())["containers"]
    environ = {each["name"]: each.get("value", "given") for each in container["env"]}
    assert from_arguments([], environ) == Settings(lease_namespace="given", identity="given")
