"""kopf's settings and registry: the watched kinds and the credentials.

kopf watches the kinds that have handlers. The handlers themselves never run: `reflector` takes each event from its
watch in order. Persistence, indices, posting and queueing limits of kopf are not used; docs/decisions/0004 says why.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import kopf

from skiff_operator import reflector
from skiff_operator.kinds import INFERENCE_SERVICE, LORA_ADAPTER, Kind
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import EventHandler
from skiff_runtime import contract


class _Backoffs:
    """Endless delays between attempts of kopf's discovery: an API server may start late."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 4.0, 8.0, 16.0), itertools.repeat(reflector.LAST_RETRY_SECONDS))


def configure(settings: Settings, kinds: Iterable[Kind]) -> kopf.OperatorSettings:
    """Return kopf's settings, each with its reason."""
    found = kopf.OperatorSettings()
    found.scanning.disabled = True  # the kinds are known; a new CRD needs no watch of all CRDs
    found.posting.enabled = False  # we send our own Events
    found.watching.chunk_size = 100  # bounds memory when many objects are listed
    found.watching.server_timeout = settings.watch_timeout_seconds
    found.watching.inactivity_timeout = settings.watch_inactivity_seconds
    found.watching.connect_timeout = 10
    found.networking.connect_timeout = 10
    found.networking.request_timeout = min(60.0, settings.watch_inactivity_seconds)
    found.networking.error_backoffs = _Backoffs()
    found.process.ultimate_exiting_timeout = 20
    for kind in kinds:
        if kind not in (INFERENCE_SERVICE, LORA_ADAPTER):
            found.watching.label_selectors[kind.group, kind.version, kind.plural] = contract.LABEL_SERVICE
    return found


def register(kinds: Iterable[Kind]) -> kopf.OperatorRegistry:
    """Return a registry that declares the login and every kind to watch."""
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    async def declared(**_: Any) -> None:
        raise AssertionError("kopf dispatched an event that the reflector should have taken")

    kopf.on.login(registry=registry)(login)
    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(declared)
    return registry


async def run(handler: EventHandler, settings: Settings) -> None:
    """Watch until a signal ends the process or this task is cancelled.

    Raises:
        OperatorError: this process cannot watch.
    """
    kinds = handler.streams.kinds
    await reflector.run(handler, register(kinds), configure(settings, kinds), settings.namespaces)
    # kopf leaves its generators of watch events unfinished, and asyncio would log that while the process ends.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
