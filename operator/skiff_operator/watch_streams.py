"""Watch streams: one for each kind and namespace, with its progress and the time of its last activity.

The controller starts to reconcile a namespace when all of its streams are synced, that is, listed completely once.
Probes and metrics report missing, refused and dead streams from here.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from skiff_operator.kinds import CHILDREN, ENGINES, GATEWAY_KINDS, INFERENCE_SERVICE, LORA_ADAPTER, POD, Kind
from skiff_operator.settings import Settings

Event = Literal["LISTED", "ADDED", "MODIFIED", "DELETED"]
"""The kind of an observation: an object of a list, or a watch event."""


def watched(engines: Iterable[str], *, inference_pools: bool = False) -> tuple[Kind, ...]:
    """Return every kind that is watched, with those of other autoscaling engines and of gateways.

    InferenceServices are listed first: children are compared with them.
    """
    optional = [ENGINES[engine] for engine in engines]
    if inference_pools:
        optional += GATEWAY_KINDS
    return (INFERENCE_SERVICE, *CHILDREN, *optional, POD, LORA_ADAPTER)


class StreamKey(NamedTuple):
    """One stream; `namespace` is None where one stream covers all namespaces."""

    kind: Kind
    namespace: str | None

    def __str__(self) -> str:
        """Return the name of the stream in logs and probes."""
        scope = f"namespace {self.namespace}" if self.namespace else "all namespaces"
        return f"{self.kind.plural} in {scope}"


@dataclass(slots=True)
class Stream:
    """The state of one stream.

    `last_activity_at` is the monotonic time of the last response of the API server of any kind, and None before the stream
    may begin. `failure` is the error that ended the last attempt, and empty while the stream works.
    """

    last_activity_at: float | None = None
    synced: bool = False
    lists: int = 0
    failure: str = ""


class WatchStreams:
    """All streams of this process. There are none before `begin`: a replica that waits for the Lease watches nothing."""

    def __init__(self, settings: Settings) -> None:
        """Create the records of the streams that `settings` require."""
        self.kinds = watched(settings.autoscaling_engines, inference_pools=settings.inference_pools)
        """The kinds that are watched; fixed once they have begun."""
        self._settings = settings
        self._scopes: tuple[str | None, ...] = settings.namespaces or (None,)
        self._dead_after = settings.stream_dead_after_seconds
        self._streams: dict[StreamKey, Stream] = {}
        self._synced: set[str | None] = set()
        self._services_listed = {scope: asyncio.Event() for scope in self._scopes}

    def begin(self, kinds: tuple[Kind, ...] | None = None) -> None:
        """Expect every stream from now on; of `kinds` only, if the API server does not serve the others."""
        self.kinds = kinds or self.kinds
        for namespace in self._scopes:
            for kind in self.kinds:
                self._streams[StreamKey(kind, namespace)] = Stream()
            self.record_activity(StreamKey(INFERENCE_SERVICE, namespace))

    async def may_begin(self, key: StreamKey) -> None:
        """Wait until the stream may be listed: children only after the InferenceServices of their namespace."""
        if key.kind != INFERENCE_SERVICE:
            await self._services_listed[key.namespace].wait()

    def record_activity(self, key: StreamKey) -> None:
        """Record activity of a working stream."""
        stream = self._streams[key]
        stream.last_activity_at, stream.failure = time.monotonic(), ""

    def failed(self, key: StreamKey, failure: str, *, answered: bool) -> None:
        """Record a failure. A refusal by the API server counts as activity all the same."""
        if answered:
            self.record_activity(key)
        self._streams[key].failure = failure

    def listed(self, key: StreamKey) -> bool:
        """Record the end of a list; return True when it completes the namespace."""
        scope, stream = key.namespace, self._streams[key]
        stream.synced = True
        stream.lists += 1
        self.record_activity(key)
        if key.kind == INFERENCE_SERVICE and not self._services_listed[scope].is_set():
            self._services_listed[scope].set()
            for kind in self.kinds:
                self.record_activity(StreamKey(kind, scope))
        if scope in self._synced or not all(
            self._streams[StreamKey(kind, scope)].synced for kind in self.kinds
        ):
            return False
        self._synced.add(scope)
        return True

    def synced(self, namespace: str) -> bool:
        """Return whether every stream of a namespace has been listed completely once."""
        return self._settings.watch_scope(namespace) in self._synced

    def is_complete(self) -> bool:
        """Return whether every stream of all namespaces has been listed completely once."""
        return self._synced.issuperset(self._scopes)

    def dead(self) -> str:
        """Return a message that names a stream without recent activity; empty when there is none."""
        for key, silence in self.silences():
            if silence > self._dead_after:
                return f"the watch of {key} has shown no sign of life for {silence:.0f} s"
        return ""

    def unsynced(self) -> str:
        """Return a message about a stream that is not listed or failed last; empty when there is none."""
        for key, stream in self._streams.items():
            if not stream.synced or stream.failure:
                return f"{key}: {stream.failure or 'not listed yet'}"
        return ""

    def silences(self) -> list[tuple[StreamKey, float]]:
        """Return the seconds since the last activity of each stream that has begun."""
        now = time.monotonic()
        return [
            (key, now - each.last_activity_at)
            for key, each in self._streams.items()
            if each.last_activity_at is not None
        ]

    def lists(self) -> list[tuple[StreamKey, int]]:
        """Return the number of completed lists of each stream."""
        return [(key, stream.lists) for key, stream in self._streams.items()]


class EventHandler(Protocol):
    """The receiver of events; its methods must not block."""

    @property
    def streams(self) -> WatchStreams:
        """Return the progress of every stream."""

    def on_event(self, kind: Kind, event: Event, obj: dict[str, Any]) -> None:
        """Handle one object of a list or a watch event."""

    def on_listed(self, stream: StreamKey, shown: set[str], resource_version: int) -> None:
        """Handle the end of a list: `shown` holds the uids of all objects at `resource_version`."""
