"""InferencePools and HTTPRoutes: what is built, and their life beside a running operator, with and without their CRDs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import COLLECTIONS, ApiServer
from controlplane import ControlPlane
from installation import running_operator
from operator_checks import find_if_served
from operator_process import OperatorProcess, eventually
from services import service
from strangers import condition

from skiff_operator import plan, revisions
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import HTTP_ROUTE, INFERENCE_POOL
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import watched

SETTINGS = Settings(inference_pools=True)
NAMESPACED = "/apis/{group}/namespaces/{{namespace}}/{plural}"
COLLECTIONS["inferencepools"] = NAMESPACED.format(
    group="inference.networking.k8s.io/v1", plural="inferencepools"
)
COLLECTIONS["httproutes"] = NAMESPACED.format(group="gateway.networking.k8s.io/v1", plural="httproutes")
ROUTE = {"parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}]}


def definition(group: str, kind: str) -> dict[str, Any]:
    """A CRD of the Gateway API as far as the operator depends on it."""
    plural = f"{kind.lower()}s"
    fields = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a part of it for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": fields}}},
                }
            ],
        },
    }


def test_the_pool_selects_the_pods_and_names_the_picker() -> None:
    built = plan.objects(service(inferencePool={"enabled": True}), SETTINGS)
    assert built[(INFERENCE_POOL, "llama")]["spec"] == {
        "selector": {"matchLabels": {"serving.skiff.dev/inferenceservice": "llama"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": "llama-epp",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }
    assert not [kind for kind, _ in built if kind == HTTP_ROUTE]
    picker = {"name": "picker", "port": 9003, "failureMode": "FailOpen"}
    built = plan.objects(service(inferencePool={"enabled": True, "endpointPicker": picker}), SETTINGS)
    reference = built[(INFERENCE_POOL, "llama")]["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"], reference["failureMode"]) == (
        "picker",
        {"number": 9003},
        "FailOpen",
    )


def test_the_route_leads_to_the_pool() -> None:
    route = {**ROUTE, "hostnames": ["llama.example.org"]}
    built = plan.objects(service(inferencePool={"enabled": True, "httpRoute": route}), SETTINGS)
    spec = built[(HTTP_ROUTE, "llama")]["spec"]
    assert spec["parentRefs"] == [
        {
            "group": "gateway.networking.k8s.io",
            "kind": "Gateway",
            "name": "public",
            "namespace": "gateways",
            "sectionName": "https",
        }
    ]
    assert spec["hostnames"] == ["llama.example.org"]
    [rule] = spec["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llama"}
    ]
    built = plan.objects(service(inferencePool={"enabled": True, "httpRoute": ROUTE}), SETTINGS)
    assert "hostnames" not in built[(HTTP_ROUTE, "llama")]["spec"]


@pytest.mark.parametrize("fields", [{}, {"inferencePool": {}}, {"inferencePool": {"httpRoute": ROUTE}}])
def test_nothing_is_made_unless_it_is_enabled(fields: dict[str, Any]) -> None:
    kinds = {kind for kind, _ in plan.objects(service(**fields), Settings())}
    assert not kinds & {INFERENCE_POOL, HTTP_ROUTE}


def test_a_pool_is_refused_where_the_operator_has_none() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.inferencePool: .*--inference-pools"):
        plan.objects(service(inferencePool={"enabled": True}), Settings())
    assert not set(watched(())) & {INFERENCE_POOL, HTTP_ROUTE}


def test_a_pool_replaces_no_pod() -> None:
    pool = {"enabled": True, "httpRoute": ROUTE}
    assert revisions.spec_hash(service()) == revisions.spec_hash(service(inferencePool=pool))


@pytest.fixture
def pools(
    api: ApiServer, server: ApiServer, plane: ControlPlane, tmp_path: Path
) -> Iterator[OperatorProcess]:
    """Run an operator of the test's namespace with the chart's rights to InferencePools; the CRDs are not installed."""
    value = "inferencePools.enabled=true"
    with running_operator(
        server, plane.kubeconfig, tmp_path, "pools", value, namespace=api.namespace
    ) as process:
        yield process


def test_the_objects_come_are_repaired_and_go(
    api: ApiServer, server: ApiServer, pools: OperatorProcess
) -> None:
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"uri": "demo://"},
            "runtime": {"device": "cpu"},
            "inferencePool": {"enabled": True, "httpRoute": ROUTE},
        },
    }
    uid = api.create("inferenceservices", body)["metadata"]["uid"]
    eventually(lambda: api.find("services", "llama"), "what the cluster knows is made")
    eventually(
        lambda: "Gateway API Inference Extension is not installed" in condition(api, "llama", "Degraded")[2],
        "its lack is reported",
    )
    writes = pools.writes()
    time.sleep(2)
    assert pools.writes() - writes < 20, "it is tried again, ever more rarely"

    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    definitions = [
        definition("inference.networking.k8s.io", "InferencePool"),
        definition("gateway.networking.k8s.io", "HTTPRoute"),
    ]
    try:
        for each in definitions:
            server.request("POST", path, each)
        pools.stop()
        pools.start()
        for plural in ("inferencepools", "httproutes"):
            made = eventually(lambda plural=plural: find_if_served(api, plural), plural)  # type: ignore[misc]
            assert made["metadata"]["ownerReferences"][0]["uid"] == uid
        eventually(lambda: condition(api, "llama", "Degraded")[0] == "False", "and the trouble is over")
        api.merge("inferencepools", "llama", {"spec": {"targetPorts": [{"number": 1}]}})
        eventually(
            lambda: find_if_served(api, "inferencepools")["spec"]["targetPorts"] == [{"number": 8000}],
            "the edit is reverted",
        )
        api.merge("inferenceservices", "llama", {"spec": {"inferencePool": {"httpRoute": None}}})
        eventually(lambda: find_if_served(api, "httproutes") is None, "the route goes")
        assert find_if_served(api, "inferencepools") is not None
        api.merge("inferenceservices", "llama", {"spec": {"inferencePool": {"enabled": False}}})
        eventually(lambda: find_if_served(api, "inferencepools") is None, "the pool goes")
    finally:
        for each in definitions:
            server.request("DELETE", f"{path}/{each['metadata']['name']}")
