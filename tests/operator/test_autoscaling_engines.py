"""HorizontalPodAutoscalers and KEDA's ScaledObjects: what is built, and their life beside a running operator."""

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

from skiff_operator import plan
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import POD_AUTOSCALER, SCALED_OBJECT
from skiff_operator.settings import Settings

SETTINGS = Settings(autoscaling_engines=("HPA", "KEDA"), prometheus_address="http://prometheus:9090")
NAMESPACED = "/apis/{group}/namespaces/{{namespace}}/{plural}"
COLLECTIONS["horizontalpodautoscalers"] = NAMESPACED.format(
    group="autoscaling/v2", plural="horizontalpodautoscalers"
)
COLLECTIONS["scaledobjects"] = NAMESPACED.format(group="keda.sh/v1alpha1", plural="scaledobjects")
KEDA = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                        },
                    }
                },
            }
        ],
    },
}
"""KEDA's definition as far as the operator depends on it."""


def policy(engine: str, **fields: Any) -> dict[str, Any]:
    """An autoscaling policy."""
    return {"maxReplicas": 4, "engine": engine, **fields}


def test_the_pod_autoscaler_reads_gauges_and_writes_to_the_subresource() -> None:
    targets = {"concurrency": 16, "queuedTokens": 2000, "kvCacheUtilization": 75}
    built = plan.objects(service(autoscaling=policy("HPA", targets=targets)), SETTINGS)
    spec = built[(POD_AUTOSCALER, "llama")]["spec"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "llama",
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 4)
    assert spec["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 300}}
    assert {
        each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"] for each in spec["metrics"]
    } == {
        "skiff_requests_in_flight": "16",
        "skiff_queued_prompt_tokens": "2000",
        "skiff_kv_cache_usage_ratio": "750m",
    }


def test_a_whole_quantity_is_written_as_it_is_stored() -> None:
    built = plan.objects(service(autoscaling=policy("HPA", targets={"kvCacheUtilization": 100})), SETTINGS)
    (metric,) = built[(POD_AUTOSCALER, "llama")]["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "1"


def test_the_scaled_object_asks_prometheus() -> None:
    fields = {
        "minReplicas": 0,
        "scaleToZeroAfterSeconds": 120,
        "targets": {"concurrency": 16, "ttftSeconds": 0.5},
    }
    built = plan.objects(service(autoscaling=policy("KEDA", **fields)), SETTINGS)
    spec = built[(SCALED_OBJECT, "llama")]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (0, 4, 120)
    concurrency, ttft, _ = spec["triggers"]
    assert concurrency["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(skiff_requests_in_flight{namespace="default",inferenceservice="llama"})',
        "threshold": "16",
    }
    assert (ttft["metricType"], ttft["metadata"]["threshold"]) == ("Value", "0.5")
    assert ttft["metadata"]["query"].endswith("[1m])) > 0) or vector(0)")


def test_the_scaled_object_of_a_service_that_may_have_no_pod_counts_requests_in_the_router() -> None:
    """A pod that loads has no metrics, and KEDA would remove it again."""

    def triggers(**fields: Any) -> list[Any]:
        autoscaling = policy("KEDA", targets={"ttftSeconds": 0.5}, **fields)
        built = plan.objects(
            service(model={"uri": "demo://", "name": "chat"}, autoscaling=autoscaling), SETTINGS
        )
        found: list[Any] = built[(SCALED_OBJECT, "llama")]["spec"]["triggers"]
        return found

    assert [each["name"] for each in triggers()] == ["ttft-seconds"]
    _, activity = triggers(minReplicas=0)
    assert activity["name"] == "activity"
    query = activity["metadata"]["query"]
    assert query.startswith(
        '(sum(max_over_time(skiff_router_waiting_requests{model="chat"}[1m])) or vector(0)) + '
    )
    assert 'skiff_requests_in_flight{namespace="default",inferenceservice="llama"}' in query
    assert 'skiff_requests_total{namespace="default",inferenceservice="llama"}' in query
    assert activity["metadata"]["threshold"] == "100000", "it demands no second pod"


def test_builtin_needs_no_object_and_an_engine_that_is_off_is_refused() -> None:
    kinds = {kind for kind, _ in plan.objects(service(autoscaling=policy("Builtin")), Settings())}
    assert not kinds & {POD_AUTOSCALER, SCALED_OBJECT}
    with pytest.raises(InvalidSpec, match="KEDA is off"):
        plan.objects(service(autoscaling=policy("KEDA")), Settings(autoscaling_engines=("HPA",)))


@pytest.fixture
def engines(
    api: ApiServer, server: ApiServer, plane: ControlPlane, tmp_path: Path
) -> Iterator[OperatorProcess]:
    """Run an operator of the test's namespace with both engines; KEDA is not installed."""
    values = ("autoscaling.engines={HPA,KEDA}", "autoscaling.prometheusAddress=http://prometheus:9090")
    with running_operator(
        server, plane.kubeconfig, tmp_path, "engines", *values, namespace=api.namespace
    ) as process:
        yield process


def condition(api: ApiServer, kind: str) -> dict[str, Any]:
    """A condition of the service."""
    found = api.get("inferenceservices", "llama").get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def test_the_engines_objects_come_are_repaired_and_go(
    api: ApiServer, server: ApiServer, engines: OperatorProcess
) -> None:
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"uri": "demo://"},
            "runtime": {"device": "cpu"},
            "replicas": 2,
            "autoscaling": policy("HPA"),
        },
    }
    uid = api.create("inferenceservices", body)["metadata"]["uid"]
    made = eventually(lambda: find_if_served(api, "horizontalpodautoscalers"), "a HorizontalPodAutoscaler")
    assert made["metadata"]["ownerReferences"][0]["uid"] == uid
    api.merge("horizontalpodautoscalers", "llama", {"spec": {"maxReplicas": 9}})
    eventually(
        lambda: find_if_served(api, "horizontalpodautoscalers")["spec"]["maxReplicas"] == 4,
        "the edit is reverted",
    )

    def is_quiet() -> bool:
        before = engines.writes()
        time.sleep(2)
        return engines.writes() == before

    eventually(is_quiet, "the API server's defaults are no difference")
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 3}}, "scale")
    eventually(lambda: api.get("deployments", "llama")["spec"]["replicas"] == 3, "it may write the number")

    api.merge("inferenceservices", "llama", {"spec": {"autoscaling": {"engine": "KEDA"}}})
    eventually(lambda: find_if_served(api, "horizontalpodautoscalers") is None, "it goes")
    eventually(
        lambda: "KEDA is not installed" in condition(api, "Degraded").get("message", ""),
        "its lack is reported",
    )
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    server.request("POST", path, KEDA)
    try:
        engines.stop()
        engines.start()
        scaled = eventually(lambda: find_if_served(api, "scaledobjects"), "a ScaledObject")
        assert scaled["spec"]["maxReplicaCount"] == 4
        eventually(lambda: condition(api, "Degraded").get("status") == "False", "and the trouble is over")
        api.merge("inferenceservices", "llama", {"spec": {"autoscaling": None}})
        eventually(lambda: find_if_served(api, "scaledobjects") is None, "it goes")
        assert api.get("inferenceservices", "llama")["spec"]["replicas"] == 3
    finally:
        server.request("DELETE", f"{path}/scaledobjects.keda.sh")
