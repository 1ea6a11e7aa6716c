"""The router's watches against a real API server: objects that come, change and go, and an API server that restarts."""

import asyncio
from collections.abc import Callable

import pytest
from apiserver import ApiServer, credentials
from controlplane import ControlPlane

from skiff_router.discovery import KubernetesDiscovery
from skiff_router.endpoints import Registry
from skiff_router.kubernetes_watch import ApiError, ClusterAccess
from skiff_router.scale_requests import CONFLICT, ScaleRequester
from skiff_router.upstream import Address
from skiff_runtime.errors import RequestError


def _access(plane: ControlPlane) -> ClusterAccess:
    server, tls = credentials(plane.kubeconfig)
    host, _, port = server.removeprefix("https://").rpartition(":")
    return ClusterAccess(Address(host, int(port)), tls, None)


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


def test_router_follows_the_cluster_also_over_a_restart(api: ApiServer, plane: ControlPlane) -> None:
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{api.namespace}/endpointslices"
    registry = Registry()

    def pods(model: str) -> list[str]:
        try:
            return [endpoint.address.host for endpoint in registry.find(model).endpoints]
        except RequestError:
            return ["no such model"]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (the API server's events are what is waited for)
                await asyncio.sleep(0.05)

    async def test() -> None:
        discovery = KubernetesDiscovery(_access(plane), registry, api.namespace)
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

    asyncio.run(test())


def test_router_asks_for_pods_at_the_version_that_it_has_seen(api: ApiServer, plane: ControlPlane) -> None:
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
        discovery = KubernetesDiscovery(_access(plane), registry, api.namespace)
        running = asyncio.get_running_loop().create_task(discovery.run())
        requester = ScaleRequester(_access(plane))
        try:
            async with asyncio.timeout(60):
                while not discovery.is_synced:  # noqa: ASYNC110 (the API server's events are what is waited for)
                    await asyncio.sleep(0.05)
            backend = registry.find("routed")
            running.cancel()
            await requester.request(backend, 1)
            assert await asyncio.to_thread(replicas) == 1
            with pytest.raises(ApiError) as refused:
                await requester.request(backend, 2)
            assert refused.value.status == CONFLICT, "its version is that of zero replicas"
            assert await asyncio.to_thread(replicas) == 1
        finally:
            running.cancel()
            requester.close()

    asyncio.run(test())
