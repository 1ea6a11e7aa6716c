"""Models and pods from InferenceServices and EndpointSlices: what a change makes of the registry."""

import msgspec
import pytest

from skiff_router.discovery import Discovery, EndpointSlice, InferenceService
from skiff_router.endpoints import Registry
from skiff_router.scaling import Scaling
from skiff_router.upstream import Address
from skiff_runtime.errors import InvalidRequest, ModelNotFound


def service(name: str, namespace: str = "shop", model: str | None = None, **spec: object) -> InferenceService:
    fields = {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "demo://", "name": model}, **spec},
    }
    return msgspec.convert(fields, InferenceService)


def endpoint(address: str, *, ready: bool | None = True, terminating: bool = False) -> dict[str, object]:
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "terminating": terminating},
        "targetRef": {"kind": "Pod", "name": f"pod-{address}"},
    }


def slice_of(
    owner: str, *endpoints: dict[str, object], name: str = "s1", port: str = "http"
) -> EndpointSlice:
    labels = {"kubernetes.io/service-name": owner}
    fields = {
        "metadata": {"name": f"{owner}-{name}", "namespace": "shop", "labels": labels},
        "endpoints": list(endpoints),
        "ports": [{"name": "metrics", "port": 1}, {"name": port, "port": 8000}],
    }
    return msgspec.convert(fields, EndpointSlice)


def test_number_of_pods_and_its_limits_are_known_while_the_service_is(
    registry: Registry, discovery: Discovery
) -> None:
    fields = {
        "metadata": {"name": "llama", "namespace": "shop", "resourceVersion": "7"},
        "spec": {
            "replicas": 0,
            "autoscaling": {"maxReplicas": 4, "minReplicas": 0, "targets": {"queuedTokens": 9}},
        },
        "status": {"startup": {"readySeconds": 31.5, "pod": "llama-1"}},
    }
    discovery.list_services([msgspec.convert(fields, InferenceService)])
    backend = registry.find("llama").backend
    assert backend.scaling == Scaling(
        replicas=0, max_replicas=4, queued_tokens=9, start_seconds=31.5, resource_version="7"
    )
    discovery.change_service("MODIFIED", service("llama"))
    assert backend.scaling == Scaling(replicas=1)
    assert backend.scaling.is_expected
    assert not backend.scaling.is_autoscaled
    discovery.change_service("DELETED", service("llama"))
    assert backend.scaling is None


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def discovery(registry: Registry) -> Discovery:
    return Discovery(registry)


def states(registry: Registry, model: str) -> dict[str, str]:
    return {each.address.host: each.state for each in registry.find(model).backend.endpoints}


def test_pods_are_ready_or_not_and_terminating_ones_are_left_out(
    registry: Registry, discovery: Discovery
) -> None:
    discovery.list_services([service("llama")])
    discovery.list_slices(
        [
            slice_of(
                "llama",
                endpoint("10.0.0.1"),
                endpoint("10.0.0.2", ready=False),
                endpoint("10.0.0.3", ready=None),
                endpoint("10.0.0.4", terminating=True),
            )
        ]
    )
    assert states(registry, "llama") == {
        "10.0.0.1": "available",
        "10.0.0.2": "not_ready",
        "10.0.0.3": "available",
    }
    assert registry.find("llama").backend.endpoints[0].address == Address("10.0.0.1", 8000)
    assert registry.find("llama").backend.endpoints[0].name == "pod-10.0.0.1"


def test_order_of_services_and_slices_does_not_matter(registry: Registry, discovery: Discovery) -> None:
    discovery.list_slices([slice_of("llama", endpoint("10.0.0.1"))])
    with pytest.raises(ModelNotFound, match="none yet"):
        registry.find("llama")
    discovery.change_service("ADDED", service("llama", model="meta-llama"))
    assert states(registry, "meta-llama") == {"10.0.0.1": "available"}


def test_pod_that_stays_keeps_its_state_and_one_that_goes_drains(
    registry: Registry, discovery: Discovery
) -> None:
    discovery.list_services([service("llama")])
    discovery.change_slice("ADDED", slice_of("llama", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
    first, second = registry.find("llama").backend.endpoints
    first.in_flight = 3
    discovery.change_slice("MODIFIED", slice_of("llama", endpoint("10.0.0.1")))
    assert registry.find("llama").backend.endpoints == [first]
    assert first.in_flight == 3
    assert second.draining
    discovery.change_slice("DELETED", slice_of("llama", endpoint("10.0.0.1")))
    assert not registry.find("llama").backend.endpoints


def test_pod_in_two_slices_is_one_and_ready_if_either_says_so(
    registry: Registry, discovery: Discovery
) -> None:
    discovery.list_services([service("llama")])
    discovery.change_slice("ADDED", slice_of("llama", endpoint("10.0.0.1", ready=False)))
    discovery.change_slice("ADDED", slice_of("llama", endpoint("10.0.0.1"), endpoint("10.0.0.2"), name="s2"))
    assert states(registry, "llama") == {"10.0.0.1": "available", "10.0.0.2": "available"}


def test_slice_without_the_port_of_the_api_has_no_pods(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("llama")])
    discovery.list_slices([slice_of("llama", endpoint("10.0.0.1"), port="grpc")])
    assert states(registry, "llama") == {}


def test_name_that_several_services_have_means_none_of_them(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("a", model="llama"), service("b", "bank", model="llama"), service("c")])
    with pytest.raises(InvalidRequest, match="bank/b, shop/a"):
        registry.find("llama")
    assert registry.find("shop/a").backend.key == "shop/a"
    discovery.change_service("DELETED", service("b", "bank"))
    assert registry.find("llama").backend.key == "shop/a"


def test_list_of_one_namespace_leaves_the_others(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("a")], "shop")
    discovery.list_services([service("b", "bank")], "bank")
    discovery.list_slices([slice_of("a", endpoint("10.0.0.1"))], "shop")
    discovery.list_slices([], "bank")
    assert states(registry, "a") == {"10.0.0.1": "available"}
    discovery.list_services([], "bank")
    assert [backend.key for backend in registry.backends] == ["shop/a"]
    discovery.list_slices([], "shop")
    assert states(registry, "a") == {}


def test_models_are_listed_by_the_names_that_find_them(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("a", model="llama"), service("b", "bank", model="llama"), service("c")])
    names = [registry.public_name(backend) for backend in registry.backends]
    assert names == ["bank/b", "shop/a", "c"]
    assert [registry.find(name).backend for name in names] == registry.backends
    with pytest.raises(ModelNotFound, match="models: bank/b, c, shop/a"):
        registry.find("z")


def test_model_is_ready_or_loading_or_at_zero(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("a", replicas=0)])

    def state() -> str:
        return registry.find("a").backend.state

    assert state() == "at_zero"
    discovery.change_service("MODIFIED", service("a", replicas=1))
    assert state() == "loading"
    discovery.change_slice("ADDED", slice_of("a", endpoint("10.0.0.1", ready=False)))
    assert state() == "loading"
    discovery.change_slice("MODIFIED", slice_of("a", endpoint("10.0.0.1")))
    assert state() == "ready"
    discovery.change_service("MODIFIED", service("a", replicas=0))
    assert state() == "ready", "its last pod still serves"
    discovery.change_slice("DELETED", slice_of("a"))
    assert state() == "at_zero"


def test_list_replaces_what_is_known(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services([service("a"), service("b")])
    discovery.list_services([service("b", model="renamed")])
    assert [backend.key for backend in registry.backends] == ["shop/b"]
    assert registry.find("renamed").backend.key == "shop/b"
    with pytest.raises(ModelNotFound, match="models: renamed"):
        registry.find("a")
