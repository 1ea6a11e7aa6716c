"""Models and pods from Kubernetes: InferenceServices name the models, EndpointSlices their pods."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from skiff_router.canary import CanarySplit
from skiff_router.endpoints import Registry
from skiff_router.kubernetes_watch import ClusterAccess, EventType, KubernetesObject, ObjectStream
from skiff_router.scaling import Scaling
from skiff_router.upstream import Address
from skiff_runtime import contract

SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
_EXPECTED_REASONS: Final = frozenset(
    {"Loading", "NoPods", "LoadFailed", "PodUnreachable", "Unauthorized", "Fetching", "FetchFailed"}
)
"""Reasons of adapters that are not ready but that some pods may serve, or starting pods will."""


class _Model(msgspec.Struct):
    name: str | None = None


class _Targets(msgspec.Struct, rename="camel"):
    concurrency: int = 0
    queued_tokens: int = 0


class _Autoscaling(msgspec.Struct, rename="camel"):
    max_replicas: int
    targets: _Targets = msgspec.field(default_factory=_Targets)


class _Spec(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    replicas: int = 1
    autoscaling: _Autoscaling | None = None


class _Startup(msgspec.Struct, rename="camel"):
    ready_seconds: float = 0.0


class _Header(msgspec.Struct):
    name: str
    value: str


class _Canary(msgspec.Struct, rename="camel"):
    revision: str
    weight: int = 0
    header: _Header | None = None
    sticky_by: str = "Conversation"
    pods: list[str] = []


class _Adapter(msgspec.Struct, rename="camel"):
    name: str
    ready: bool = False
    reason: str = ""
    loaded_pods: int = 0


class _ServiceStatus(msgspec.Struct):
    startup: _Startup | None = None
    canary: _Canary | None = None
    adapters: list[_Adapter] = []


class InferenceService(KubernetesObject):
    """An InferenceService, as far as the router reads it."""

    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _ServiceStatus | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Reference(msgspec.Struct):
    name: str = ""


class _SliceEndpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _Reference | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(KubernetesObject):
    """An EndpointSlice of a Service of ours."""

    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


@dataclass(frozen=True, slots=True)
class SlicePod:
    """One pod of a slice. Terminating pods are left out: they get nothing more."""

    address: Address
    name: str
    ready: bool


def pods_of(slice_: EndpointSlice) -> list[SlicePod]:
    """Return the pods of a slice that do not terminate, at the port of the API."""
    ports = [each.port for each in slice_.ports or () if each.name == contract.API_PORT_NAME and each.port]
    if not ports:
        return []
    return [
        SlicePod(
            Address(each.addresses[0], ports[0]),
            each.target_ref.name if each.target_ref is not None else each.addresses[0],
            each.conditions.ready is not False,
        )
        for each in slice_.endpoints or ()
        if each.addresses and not each.conditions.terminating
    ]


def scaling_of(service: InferenceService) -> Scaling:
    """Return the number of pods that an InferenceService wants, and may have."""
    autoscaling = service.spec.autoscaling
    startup = service.status.startup if service.status is not None else None
    targets = autoscaling.targets if autoscaling is not None else _Targets()
    return Scaling(
        replicas=service.spec.replicas,
        max_replicas=autoscaling.max_replicas if autoscaling is not None else 0,
        concurrency=targets.concurrency,
        queued_tokens=targets.queued_tokens,
        start_seconds=startup.ready_seconds if startup is not None else 0.0,
        resource_version=service.metadata.resource_version,
    )


def canary_of(service: InferenceService) -> CanarySplit | None:
    """Return the canary of an InferenceService, if it has one with pods."""
    canary = service.status.canary if service.status is not None else None
    if canary is None or not canary.pods:
        return None
    header = canary.header
    return CanarySplit(
        revision=canary.revision,
        pods=frozenset(canary.pods),
        weight=canary.weight,
        header=(header.name.lower().encode(), header.value.encode()) if header is not None else None,
        sticky_by="Key" if canary.sticky_by == "Key" else "Conversation",
    )


def adapters_of(service: InferenceService) -> dict[str, bool]:
    """Return the LoRA adapters of an InferenceService, and whether all ready pods answer for each.

    One that is loaded nowhere is left out, unless it waits for pods to start.
    """
    adapters = service.status.adapters if service.status is not None else []
    return {
        each.name: each.ready
        for each in adapters
        if each.ready or each.loaded_pods or each.reason in _EXPECTED_REASONS
    }


class Discovery:
    """Keeps a registry equal to what the cluster holds."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._models: dict[str, str] = {}
        self._slices: dict[str, dict[str, list[SlicePod]]] = {}

    def list_services(self, services: Sequence[InferenceService], namespace: str = "") -> None:
        """Replace all InferenceServices of a namespace, "" for those of all."""
        found = {_key(each): each for each in services}
        for key in [key for key in self._models if _is_in(key, namespace) and key not in found]:
            self._remove(key)
        for service in services:
            self._put(service)

    def change_service(self, event: EventType, service: InferenceService) -> None:
        """Apply a change of an InferenceService."""
        if event == "DELETED":
            self._remove(_key(service))
        else:
            self._put(service)

    def list_slices(self, slices: Sequence[EndpointSlice], namespace: str = "") -> None:
        """Replace all EndpointSlices of a namespace, "" for those of all."""
        self._slices = {key: known for key, known in self._slices.items() if not _is_in(key, namespace)}
        for each in slices:
            self._slices.setdefault(_service_key(each), {})[each.metadata.name] = pods_of(each)
        for key in self._models:
            if _is_in(key, namespace):
                self._update(key)

    def change_slice(self, event: EventType, slice_: EndpointSlice) -> None:
        """Apply a change of an EndpointSlice."""
        key = _service_key(slice_)
        slices = self._slices.setdefault(key, {})
        if event == "DELETED":
            slices.pop(slice_.metadata.name, None)
        else:
            slices[slice_.metadata.name] = pods_of(slice_)
        if not slices:
            del self._slices[key]
        if key in self._models:
            self._update(key)

    def _put(self, service: InferenceService) -> None:
        key, model = _key(service), service.spec.model.name or service.metadata.name
        backend = self._registry.put(key, model)
        backend.scaling, backend.canary = scaling_of(service), canary_of(service)
        self._registry.set_adapters(backend, adapters_of(service))
        if self._models.get(key) != model:
            self._models[key] = model
            self._update(key)

    def _remove(self, key: str) -> None:
        del self._models[key]
        self._registry.remove(key)

    def _update(self, key: str) -> None:
        """Give a backend the pods of all slices of its Service. A pod in two slices, as while it moves, is one."""
        states = {
            state.address: state
            for pods in self._slices.get(key, {}).values()
            for state in sorted(pods, key=lambda pod: pod.ready)
        }
        backend = self._registry.put(key, self._models[key])
        backend.update({address: state.name for address, state in states.items()})
        for endpoint in backend.endpoints:
            endpoint.ready = states[endpoint.address].ready


class KubernetesDiscovery:
    """The two streams of each namespace, or of all, that feed a ``Discovery``."""

    def __init__(self, access: ClusterAccess, registry: Registry, namespaces: Sequence[str]) -> None:
        """``namespaces``: those that are followed; all if there are none."""
        discovery = Discovery(registry)
        self._streams: list[ObjectStream[InferenceService] | ObjectStream[EndpointSlice]] = []
        for namespace in namespaces or [""]:
            scope = f"/namespaces/{namespace}" if namespace else ""
            services = ObjectStream(
                access,
                f"/apis/{contract.API_GROUP}/{contract.API_VERSION}{scope}/inferenceservices",
                InferenceService,
                selector="",
                on_list=partial(discovery.list_services, namespace=namespace),
                on_event=discovery.change_service,
            )
            slices = ObjectStream(
                access,
                f"/apis/discovery.k8s.io/v1{scope}/endpointslices",
                EndpointSlice,
                selector=contract.LABEL_SERVICE,
                on_list=partial(discovery.list_slices, namespace=namespace),
                on_event=discovery.change_slice,
            )
            self._streams += [services, slices]

    async def run(self) -> None:
        """Follow the cluster for ever."""
        async with asyncio.TaskGroup() as group:
            for stream in self._streams:
                group.create_task(stream.run())

    @property
    def is_synced(self) -> bool:
        """Return whether both kinds were listed once in each namespace."""
        return all(stream.is_synced for stream in self._streams)


def _is_in(key: str, namespace: str) -> bool:
    return not namespace or key.startswith(f"{namespace}/")


def _key(obj: KubernetesObject) -> str:
    return f"{obj.metadata.namespace}/{obj.metadata.name}"


def _service_key(slice_: EndpointSlice) -> str:
    """Return the key of the InferenceService whose Service the slice belongs to; they have the same name."""
    return f"{slice_.metadata.namespace}/{(slice_.metadata.labels or {}).get(SERVICE_NAME_LABEL, '')}"
