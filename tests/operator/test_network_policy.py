"""The NetworkPolicy of an InferenceService: made on request, repaired, and removed; its rules are those of the spec."""

from typing import Any

import pytest
from apiserver import ApiServer
from operator_process import eventually
from services import hub, service
from strangers import condition, inference_service

from skiff_operator import plan
from skiff_operator.kinds import NETWORK_POLICY
from skiff_operator.settings import Settings

PORT = [{"port": "http", "protocol": "TCP"}]
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
HTTPS = {"ports": [{"port": 443, "protocol": "TCP"}]}
NAMESPACE: dict[str, Any] = {"podSelector": {}}
GATEWAY = {"podSelector": {"matchLabels": {"app": "gateway"}}, "namespaceSelector": {}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
OPERATOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "skiff-system"}}}
PROXY = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}}], "ports": [{"port": 3128}]}


def rules(policy: dict[str, Any], **fields: Any) -> tuple[Any, Any]:
    """Return the rules for incoming and outgoing connections."""
    built = plan.objects(service(networkPolicy=policy, **fields), Settings())[(NETWORK_POLICY, "llama")][
        "spec"
    ]
    assert built["podSelector"] == {"matchLabels": {"serving.skiff.dev/inferenceservice": "llama"}}
    assert built["policyTypes"] == ["Ingress", "Egress"]
    return built["ingress"], built["egress"]


@pytest.mark.parametrize(
    ("policy", "peers"),
    [
        ({}, [NAMESPACE]),
        ({"metricsFrom": [MONITORING]}, [NAMESPACE, MONITORING]),
        ({"from": [GATEWAY]}, [GATEWAY]),
        ({"from": [GATEWAY], "metricsFrom": [MONITORING]}, [GATEWAY, MONITORING]),
        ({"from": [], "metricsFrom": [MONITORING]}, [MONITORING]),
        ({"from": []}, []),
    ],
)
def test_peers_reach_the_api_port_alone(policy: dict[str, Any], peers: list[Any]) -> None:
    assert rules(policy) == ([{"from": [OPERATOR, *peers], "ports": PORT}], [DNS])


@pytest.mark.parametrize(("policy", "peers"), [({}, []), ({"from": [GATEWAY]}, [GATEWAY])])
def test_exclusive_router_replaces_the_namespace_but_not_the_peers_of_the_spec(
    policy: dict[str, Any], peers: list[Any]
) -> None:
    settings = Settings(router_exclusive=True)
    built = plan.objects(service(networkPolicy=policy), settings)[(NETWORK_POLICY, "llama")]["spec"]
    assert built["ingress"] == [{"from": [OPERATOR, *peers], "ports": PORT}]


def test_only_downloads_may_use_https_and_more_is_given_by_the_spec() -> None:
    assert rules({}, model=hub())[1] == [DNS, HTTPS]
    assert rules({}, model={"uri": "pvc://models/llama"})[1] == [DNS]
    proxy = {**PROXY, "ports": [{"protocol": "TCP", "port": 3128}]}
    assert rules({"egress": [PROXY, {}]})[1] == [DNS, proxy, {}]


@pytest.mark.usefixtures("operator")
def test_a_policy_is_made_repaired_changed_and_removed(api: ApiServer) -> None:
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}}
    policy = {"from": [GATEWAY], "metricsFrom": [MONITORING], "egress": [PROXY]}
    api.create("inferenceservices", inference_service("llama", **spec, networkPolicy=policy))
    made = eventually(lambda: api.find("networkpolicies", "llama"), "a policy")
    eventually(lambda: api.find("deployments", "llama"), "a Deployment")
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("InferenceService", "llama", True)
    assert made["spec"]["ingress"] == [{"from": [OPERATOR, GATEWAY, MONITORING], "ports": PORT}]

    def is_repaired() -> bool:
        live = api.find("networkpolicies", "llama")
        return live is not None and live["spec"] == made["spec"]

    wider = {**GATEWAY, "podSelector": {}}
    ingress = made["spec"]["ingress"][0]
    for edit in (
        {"ingress": [{**ingress, "from": [OPERATOR, wider, MONITORING]}]},
        {"ingress": [{**ingress, "ports": [*PORT, {"port": 9999, "protocol": "TCP"}]}]},
        {"ingress": [ingress, {}]},
        {"egress": [*made["spec"]["egress"], {}]},
        {"podSelector": {"matchLabels": {"extra": "label"}}},
        {"policyTypes": ["Egress"]},
    ):
        before = api.merge("networkpolicies", "llama", {"spec": edit})
        assert before["spec"] != made["spec"], edit
        eventually(is_repaired, f"repaired: {edit}")
    api.delete("networkpolicies", "llama")
    eventually(is_repaired, "made again")

    writes = api.get("networkpolicies", "llama")["metadata"]["resourceVersion"]
    api.merge("inferenceservices", "llama", {"spec": {"networkPolicy": {"from": None, "metricsFrom": None}}})
    eventually(
        lambda: (
            api.get("networkpolicies", "llama")["spec"]["ingress"]
            == [{"from": [OPERATOR, NAMESPACE], "ports": PORT}]
        ),
        "the default peers",
    )
    assert api.get("networkpolicies", "llama")["metadata"]["resourceVersion"] != writes
    api.merge("inferenceservices", "llama", {"spec": {"networkPolicy": None}})
    eventually(lambda: api.find("networkpolicies", "llama") is None, "no policy")


@pytest.mark.usefixtures("operator")
def test_no_pod_is_made_without_its_policy(api: ApiServer) -> None:
    """Here the policy's name belongs to another object."""
    stranger = {"metadata": {"name": "llama"}, "spec": {"podSelector": {}}}
    api.create("networkpolicies", stranger)
    fields = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "networkPolicy": {}}
    api.create("inferenceservices", inference_service("llama", **fields))
    eventually(lambda: condition(api, "llama")[1] == "NameConflict", "the conflict is reported")
    eventually(lambda: api.find("services", "llama"), "the rest is made")
    assert api.find("deployments", "llama") is None
    api.delete("networkpolicies", "llama")
    eventually(lambda: api.find("deployments", "llama"), "the Deployment")
