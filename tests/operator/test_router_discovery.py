"""The router against a real API server, with the chart's rights: objects that come, change and go, also over a restart."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml
from apiserver import APPLY, ApiServer, Refused, credentials
from controlplane import ControlPlane
from helm import Helm
from installation import PATHS
from operator_process import eventually, token_kubeconfig

from skiff_router.discovery import KubernetesDiscovery
from skiff_router.endpoints import Registry
from skiff_router.kubernetes_watch import ApiError, ClusterAccess
from skiff_router.scale_requests import CONFLICT, ScaleRequester
from skiff_router.upstream import Address
from skiff_runtime.errors import RequestError

ACCOUNT = "skiff-router"
OTHERS: dict[str, str] = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "Service": "/api/v1/namespaces/{namespace}/services",
}


def _router_objects(*values: str) -> list[Any]:
    """The objects that the chart makes for a router."""
    return [
        body
        for body in Helm().render("router.enabled=true", "monitoring.dashboards=false", *values)
        if body["metadata"].get("labels", {}).get("app.kubernetes.io/name") == ACCOUNT
    ]


def _apply(api: ApiServer, body: Any, query: str = "") -> None:
    meta = body["metadata"]
    path = {**PATHS, **OTHERS}[body["kind"]].format(namespace=meta.get("namespace", ""))
    api.request("PATCH", f"{path}/{meta['name']}?fieldManager=tests&force=true{query}", body, kind=APPLY)


@pytest.fixture
def access(api: ApiServer, plane: ControlPlane, tmp_path: Path) -> ClusterAccess:
    """The access of the router's ServiceAccount, whose rights are those of the chart for one namespace."""
    bodies = [
        body for body in _router_objects(f"watchNamespaces={{{api.namespace}}}") if body["kind"] in PATHS
    ]
    assert sorted(body["kind"] for body in bodies) == ["Role", "RoleBinding", "ServiceAccount"]
    for body in [{"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "skiff-system"}}, *bodies]:
        _apply(api, body)
    system = api.in_namespace("skiff-system")
    config = yaml.safe_load(token_kubeconfig(system, ACCOUNT, plane.kubeconfig))
    token = tmp_path / "token"
    token.write_text(config["users"][0]["user"]["token"])
    server, tls = credentials(plane.kubeconfig, with_user=False)
    host, _, port = server.removeprefix("https://").rpartition(":")
    eventually(
        lambda: _may(api, "list", "endpointslices", "discovery.k8s.io"), "the router's role is in force"
    )
    return ClusterAccess(Address(host, int(port)), tls, token)


def _may(api: ApiServer, verb: str, resource: str, group: str) -> bool:
    """Return whether the router's account has a right in the namespace."""
    plural, _, subresource = resource.partition("/")
    attributes = {
        "namespace": api.namespace,
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
    }
    spec = {"user": f"system:serviceaccount:skiff-system:{ACCOUNT}", "resourceAttributes": attributes}
    answer = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
    return bool(answer["status"]["allowed"])


def _slice(*addresses: str) -> dict[str, object]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "routed-1",
            "labels": {
                "kubernetes.io/service-name": "routed",
                "serving.skiff.dev/inferenceservice": "routed",
            },
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    }


@pytest.mark.usefixtures("access")
def test_router_may_read_no_secrets_and_change_only_the_number_of_pods(api: ApiServer) -> None:
    assert _may(api, "watch", "inferenceservices", "serving.skiff.dev")
    assert _may(api, "patch", "inferenceservices/scale", "serving.skiff.dev")
    for verb, resource, group in (
        ("list", "secrets", ""),
        ("list", "pods", ""),
        ("get", "inferenceservices", "serving.skiff.dev"),
        ("patch", "inferenceservices", "serving.skiff.dev"),
        ("delete", "endpointslices", "discovery.k8s.io"),
    ):
        assert not _may(api, verb, resource, group), (verb, resource)


@pytest.mark.parametrize(
    "values",
    [
        (),
        (
            "router.apiKeysSecret.name=clients",
            "router.backendApiKeySecret.name=pods",
            'router.limits:={"default":{"concurrency":8}}',
            "router.service.type=NodePort",
            "networkPolicy.enabled=true",
            'router.clientsFrom:=[{"podSelector":{}}]',
            'router.podAnnotations:={"a":"b"}',
        ),
    ],
)
def test_objects_of_the_chart_are_accepted(api: ApiServer, values: tuple[str, ...]) -> None:
    bodies = _router_objects(*values)
    assert len(bodies) >= 6
    _apply(api, {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "skiff-system"}})
    for body in bodies:
        _apply(api, body, "&dryRun=All&fieldValidation=Strict")
    deployment = next(body for body in bodies if body["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["nonsense"] = 1
    with pytest.raises(Refused, match="nonsense"):
        _apply(api, deployment, "&dryRun=All&fieldValidation=Strict")


def test_router_follows_the_cluster_also_over_a_restart(
    api: ApiServer, plane: ControlPlane, access: ClusterAccess
) -> None:
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{api.namespace}/endpointslices"
    registry = Registry()

    def pods(model: str) -> list[str]:
        try:
            return [endpoint.address.host for endpoint in registry.find(model).backend.endpoints]
        except RequestError:
            return ["no such model"]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (the API server's events are what is waited for)
                await asyncio.sleep(0.05)

    async def test() -> None:
        discovery = KubernetesDiscovery(access, registry, (api.namespace,))
        running = asyncio.get_running_loop().create_task(discovery.run())
        try:
            await until(lambda: discovery.is_synced)
            body = {
                "apiVersion": "serving.skiff.dev/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": "routed"},
                "spec": {"model": {"uri": "demo://", "name": "m"}},
            }
            await asyncio.to_thread(api.create, "inferenceservices", body)
            await until(lambda: pods("m") == [])
            await asyncio.to_thread(api.request, "POST", slices, _slice("10.9.0.1", "10.9.0.2"))
            await until(lambda: pods("m") == ["10.9.0.1", "10.9.0.2"])
            plane.restart("kube-apiserver")  # not in a thread, with whose end the API server would end
            assert pods("m") == ["10.9.0.1", "10.9.0.2"], "a router without an API server keeps what it knows"
            await asyncio.to_thread(api.request, "PUT", f"{slices}/routed-1", _slice("10.9.0.2"))
            await until(lambda: pods("m") == ["10.9.0.2"])
            await asyncio.to_thread(api.delete, "inferenceservices", "routed")
            await until(lambda: pods("m") == ["no such model"])
        finally:
            running.cancel()

    uvloop.run(test())


def test_router_asks_for_pods_at_the_version_that_it_has_seen(api: ApiServer, access: ClusterAccess) -> None:
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "routed"},
        "spec": {
            "model": {"uri": "demo://"},
            "replicas": 0,
            "autoscaling": {"minReplicas": 0, "maxReplicas": 4},
        },
    }
    api.create("inferenceservices", body)
    registry = Registry()

    def replicas() -> int:
        found: int = api.get("inferenceservices", "routed")["spec"]["replicas"]
        return found

    async def test() -> None:
        discovery = KubernetesDiscovery(access, registry, [api.namespace])
        running = asyncio.get_running_loop().create_task(discovery.run())
        requester = ScaleRequester(access)
        try:
            async with asyncio.timeout(60):
                while not discovery.is_synced:  # noqa: ASYNC110 (the API server's events are what is waited for)
                    await asyncio.sleep(0.05)
            backend = registry.find("routed").backend
            running.cancel()
            seen = backend.scaling
            assert seen is not None
            await requester.request(backend, seen, 1)
            assert await asyncio.to_thread(replicas) == 1
            with pytest.raises(ApiError) as refused:
                await requester.request(backend, seen, 2)
            assert refused.value.status == CONFLICT, "its version is that of zero replicas"
            assert await asyncio.to_thread(replicas) == 1
        finally:
            running.cancel()
            requester.close()

    uvloop.run(test())
