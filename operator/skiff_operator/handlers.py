"""The wiring to kopf, and nothing else: which kinds are watched, how, and where their events go.

kopf brings discovery, credentials and watches that survive disconnects. Its handlers that keep state on the
objects, its indices and its own queueing limits are not used; docs/decisions/0004 says why.
"""

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import kopf

from skiff_operator.kinds import CHILDREN, INFERENCE_SERVICE, POD, Kind
from skiff_operator.observe import Event
from skiff_operator.settings import Settings
from skiff_runtime import contract


class Sink(Protocol):
    """Whoever takes the events."""

    def on_event(self, kind: Kind, event: Event, obj: dict[str, Any]) -> None:
        """Take in one event; must not block."""


class _NoStorage(kopf.DiffBaseStorage):  # type: ignore[misc]  # kopf is not type-checked here
    """Remembers nothing on the objects: only level-triggered code reads them."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> None:
        return None

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return None


def configure() -> kopf.OperatorSettings:
    """kopf's settings, each with its reason."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # the kinds are known; a new CRD needs no watch of all CRDs
    settings.posting.enabled = False  # Events are few and ours
    settings.persistence.diffbase_storage = _NoStorage()
    settings.queueing.idle_timeout = (
        0.1  # an object has a task for as long as it has events; 0 would hang kopf
    )
    settings.queueing.exit_timeout = 1.0
    settings.watching.chunk_size = 100  # bounds memory when many objects are listed
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 120  # bookmarks come every minute or so
    settings.watching.connect_timeout = 10
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.process.ultimate_exiting_timeout = 20
    for kind in (*CHILDREN, POD):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = contract.LABEL_SERVICE
    return settings


def register(sink: Sink) -> kopf.OperatorRegistry:
    """A registry whose only handlers pass every event of every kind of ours to `sink`."""
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    kopf.on.login(registry=registry)(login)
    for kind in (INFERENCE_SERVICE, *CHILDREN, POD):
        _watch(registry, kind, sink)
    return registry


async def run(sink: Sink, settings: Settings) -> None:
    """Watch until a signal ends the process or this task is cancelled."""
    await kopf.operator(
        registry=register(sink),
        settings=configure(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )
    # kopf leaves its generators of watch events unfinished, about which asyncio complains while the process ends.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _watch(registry: kopf.OperatorRegistry, kind: Kind, sink: Sink) -> None:
    async def pass_on(event: dict[str, Any], **_: Any) -> None:
        sink.on_event(kind, event["type"] or "LISTED", event["object"])

    kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(pass_on)
