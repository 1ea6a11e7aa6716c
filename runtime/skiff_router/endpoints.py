"""The state of each pod as the router sees it: ready, draining or ejected, with its load and its connections.

Ejection is by failures alone, not by slowness: a pod with a long queue answers late and is healthy. A pod that refuses
connections, resets them, or does not answer its probe is not chosen until a probe succeeds.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from skiff_router.canary import CanarySplit
from skiff_router.pod_state import PodState
from skiff_router.scaling import Scaling
from skiff_router.upstream import Address, ConnectionPool
from skiff_runtime.errors import InvalidRequest, ModelNotFound

EJECTING_FAILURES: Final = 2
"""Failures in a row after which a pod is ejected. One may be the race of a request with the end of an idle connection."""
PROBE_SECONDS: Final = 1.0
"""Interval of the probes of a pod."""
PROBE_TIMEOUT_SECONDS: Final = 2.0
"""A pod that does not answer a probe for this long hangs: the API process of a busy one answers in milliseconds."""
MAX_RESIDENT_IMBALANCE: Final = 4
"""Requests by which a pod with an adapter in a LoRA slot may be busier than the least busy one, and still gets its requests."""
MAX_LISTED_NAMES: Final = 50
"""Models that the error for an unknown one lists."""

EndpointState = Literal["available", "draining", "ejected", "not_ready", "silent"]
BackendState = Literal["ready", "loading", "at_zero"]


@dataclass(eq=False, slots=True)
class Endpoint:
    """One pod. ``name`` is its pod's name, or its address where it is not known.

    ``in_flight``: requests of this router that have no complete response yet. ``failures``: failures since the last
    response. ``ready``: from the EndpointSlice; ``ejected``: by this router's probes and failures; ``pod``:
    state from the pod's events, the last one at ``last_event_at``; ``silent``: its events have stopped.
    """

    name: str
    address: Address
    ready: bool = True
    draining: bool = False
    ejected: bool = False
    failures: int = 0
    in_flight: int = 0
    silent: bool = False
    last_event_at: float = 0.0
    pod: PodState = field(default_factory=PodState)
    pool: ConnectionPool = field(init=False)

    def __post_init__(self) -> None:
        """Make the pool of connections."""
        self.pool = ConnectionPool(self.address)

    @property
    def is_available(self) -> bool:
        """Return whether new requests may be sent here."""
        return self.ready and not self.draining and not self.ejected and self.pod.accepts_requests

    @property
    def state(self) -> EndpointState:
        """Return the state for metrics and ``/v1/models``."""
        if not self.ready:
            return "not_ready"
        if self.ejected:
            return "ejected"
        if self.draining or not self.pod.accepts_requests:
            return "draining"
        return "silent" if self.silent else "available"

    @property
    def requests(self) -> int:
        """Return the requests in flight at the pod: as it reports, or else of this router alone."""
        return max(self.in_flight, self.pod.requests)

    def record_response(self) -> None:
        """Record a response of any status but those of a pod that ends."""
        self.failures = 0

    def record_failure(self) -> bool:
        """Record a failed exchange. Returns True if it ejects the pod."""
        self.failures += 1
        if self.ejected or self.failures < EJECTING_FAILURES:
            return False
        self.eject()
        return True

    def eject(self) -> None:
        """Choose this pod no more until a probe succeeds. Idle connections are closed: they belong to what failed."""
        self.ejected = True
        self.pool.close_idle()

    def restore(self) -> None:
        """Choose this pod again."""
        self.ejected = False
        self.draining = False
        self.failures = 0

    def drain(self) -> None:
        """Choose this pod no more, because it ends; what it runs goes on."""
        self.draining = True
        self.pool.close_idle()


@dataclass(eq=False, slots=True)
class Backend:
    """The pods that serve one model: those of an InferenceService, or those that ``--backend`` names.

    ``key`` is ``namespace/name`` of the InferenceService, or the model's name. ``endpoints`` are in the order of their
    names, so that routers which see the same pods see them in the same order. ``scaling``: the number of pods that the
    cluster wants; None for pods that ``--backend`` names. ``canary``: the split of requests between two revisions, if
    there is one. ``adapters``: names of LoRA adapters, and whether all ready pods answer for each.
    """

    key: str
    model: str
    endpoints: list[Endpoint] = field(default_factory=list)
    scaling: Scaling | None = None
    canary: CanarySplit | None = None
    adapters: dict[str, bool] = field(default_factory=dict)

    @property
    def state(self) -> BackendState:
        """Return whether requests are served, pods are awaited, or there are to be none."""
        if any(endpoint.is_available for endpoint in self.endpoints):
            return "ready"
        return "at_zero" if self.scaling is not None and not self.scaling.replicas else "loading"

    def available(self) -> list[Endpoint]:
        """Return the pods to which new requests may be sent, in the order of their names.

        Silent and full ones are left out if there are others.
        """
        best = [
            endpoint
            for endpoint in self.endpoints
            if endpoint.is_available and not (endpoint.silent or endpoint.pod.is_full)
        ]
        return best or [endpoint for endpoint in self.endpoints if endpoint.is_available]

    def select_revision(self, endpoints: list[Endpoint], *, canary: bool) -> list[Endpoint]:
        """Return those of ``endpoints`` that belong to the canary, or to the old revision; all if there is no such pod."""
        if self.canary is None:
            return endpoints
        pods = self.canary.pods
        return [endpoint for endpoint in endpoints if (endpoint.name in pods) == canary] or endpoints

    def select_adapter(self, endpoints: list[Endpoint], adapter: str) -> list[Endpoint]:
        """Return the pods among ``endpoints`` for a request of a LoRA adapter.

        They are those with it in a LoRA slot, unless they are overloaded; else those that have it loaded; else all, any of
        which reports that it is missing. A pod that does not report its adapters may have it.
        """
        having = [
            each for each in endpoints if each.pod.adapters is None or adapter in each.pod.adapters.loaded
        ]
        having = having or endpoints
        resident = [each for each in having if each.pod.adapters and adapter in each.pod.adapters.resident]
        if not resident:
            return having
        least = min(endpoint.requests for endpoint in having)
        return [each for each in resident if each.requests <= least + MAX_RESIDENT_IMBALANCE] or having

    def update(self, wanted: dict[Address, str]) -> None:
        """Replace the pods by ``wanted``, names by address. A pod that stays keeps its state."""
        known = {endpoint.address: endpoint for endpoint in self.endpoints}
        for address, endpoint in known.items():
            if address not in wanted:
                endpoint.drain()
                endpoint.pool.close()
        self.endpoints = sorted(
            (known.get(address) or Endpoint(name, address) for address, name in wanted.items()),
            key=lambda endpoint: (endpoint.name, endpoint.address),
        )


@dataclass(frozen=True, slots=True)
class Route:
    """The target of a request: the pods of a model, and the LoRA adapter, "" for the model itself."""

    backend: Backend
    adapter: str = ""

    @property
    def served_name(self) -> str:
        """Return the name by which the pods know the target."""
        return self.adapter or self.backend.model


class Registry:
    """All models by the names that requests use: the model's name, and ``namespace/name``.

    A model's name that several InferenceServices have resolves to none of them: otherwise anyone who can create an
    InferenceService could receive another namespace's requests. The same holds for LoRA adapters, which have the names
    ``adapter`` and ``namespace/name/adapter``; where a model has the name of an adapter, the name means the model. The
    names with a namespace keep their meaning, whatever others call their models and adapters.
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._by_model: dict[str, list[Backend]] = {}
        self._by_adapter: dict[str, list[Backend]] = {}
        self._routes: dict[str, Route] = {}

    @property
    def backends(self) -> list[Backend]:
        """Return all backends, in the order of their keys."""
        return [self._backends[key] for key in sorted(self._backends)]

    def put(self, key: str, model: str) -> Backend:
        """Return the backend with this key; add it if it is new, and change its model's name."""
        backend = self._backends.get(key)
        if backend is None:
            backend = self._backends[key] = Backend(key, model)
        elif backend.model == model:
            return backend
        backend.model = model
        self._index()
        return backend

    def set_adapters(self, backend: Backend, adapters: dict[str, bool]) -> None:
        """Replace the LoRA adapters of a backend."""
        named = backend.adapters.keys() != adapters.keys()
        backend.adapters = adapters
        if named:
            self._index()

    def remove(self, key: str) -> None:
        """Remove a backend; its requests in flight go on."""
        backend = self._backends.pop(key, None)
        if backend is not None:
            backend.scaling = backend.canary = None
            backend.update({})
            self._index()

    def find(self, name: str) -> Route:
        """Return the target for the ``model`` of a request.

        Raises:
            ModelNotFound: None has this name; the message lists those that there are.
            InvalidRequest: Several have it; the message lists their unique names.
        """
        route = self._routes.get(name)
        if route is not None:
            return route
        models, adapters = self._by_model.get(name), self._by_adapter.get(name)
        if models is not None:
            raise _ambiguous(
                f"several InferenceServices serve a model {name!r}", [each.key for each in models]
            )
        if adapters is not None:
            keys = [_adapter_key(each, name) for each in adapters]
            raise _ambiguous(f"several InferenceServices serve an adapter {name!r}", keys)
        raise ModelNotFound(
            f"the model {name!r} is not served here; models: {', '.join(self._names()) or 'none yet'}",
            param="model",
        )

    def public_name(self, backend: Backend) -> str:
        """Return the name by which clients request a backend: its model's, or its key where that means another one, too."""
        return backend.model if self._routes.get(backend.model) == Route(backend) else backend.key

    def public_adapter_name(self, backend: Backend, adapter: str) -> str:
        """Return the name by which clients request an adapter: its own, or its key where that means something else, too."""
        is_own = self._routes.get(adapter) == Route(backend, adapter)
        return adapter if is_own else _adapter_key(backend, adapter)

    def _names(self) -> list[str]:
        """Return some of the names by which models and adapters are requested, in order."""
        names = [self.public_name(backend) for backend in self._backends.values()]
        names += [
            self.public_adapter_name(backend, adapter)
            for backend in self._backends.values()
            for adapter in backend.adapters
        ]
        names.sort()
        return names if len(names) <= MAX_LISTED_NAMES else [*names[:MAX_LISTED_NAMES], "..."]

    def _index(self) -> None:
        """Find the route of each name: that of a key before a model's, and both before an adapter's.

        A key means one thing, whatever others call their models and adapters. A name means nothing if several have it.
        """
        self._by_model, self._by_adapter, self._routes = {}, {}, {}
        for backend in self.backends:
            self._by_model.setdefault(backend.model, []).append(backend)
            for adapter in backend.adapters:
                self._by_adapter.setdefault(adapter, []).append(backend)
        for adapter, serving in self._by_adapter.items():
            if len(serving) == 1 and adapter not in self._by_model:
                self._routes[adapter] = Route(serving[0], adapter)
        for model, serving in self._by_model.items():
            if len(serving) == 1:
                self._routes[model] = Route(serving[0])
        for backend in self.backends:
            self._routes[backend.key] = Route(backend)
            for adapter in backend.adapters:
                self._routes[_adapter_key(backend, adapter)] = Route(backend, adapter)


def _adapter_key(backend: Backend, adapter: str) -> str:
    return f"{backend.key}/{adapter}"


def _ambiguous(fact: str, keys: list[str]) -> InvalidRequest:
    return InvalidRequest(
        f"{fact}; name one of them: {', '.join(keys)}", param="model", code="model_ambiguous"
    )
