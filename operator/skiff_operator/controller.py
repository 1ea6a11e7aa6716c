"""The controller: watch events add keys to the queue, workers reconcile them, the resync adds all of them again."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from skiff_operator import metrics
from skiff_operator.errors import OperatorError, Retryable
from skiff_operator.kinds import LORA_ADAPTER, Kind, Stage
from skiff_operator.log import logger
from skiff_operator.lora.index import Index
from skiff_operator.observe import Observer, ReconcileRequest
from skiff_operator.reconcile import Reconciler
from skiff_operator.settings import Settings
from skiff_operator.startup_reader import StartupReader
from skiff_operator.watch_streams import Event, StreamKey, WatchStreams
from skiff_operator.workqueue import STAGE_DEADLINE_SECONDS, Key, WorkQueue


class Controller:
    """Connects events, the queue and the reconciler."""

    def __init__(
        self,
        observer: Observer,
        reconciler: Reconciler,
        streams: WatchStreams,
        settings: Settings,
        adapters: Index,
    ) -> None:
        """Reconcile the namespaces whose `streams` are synced, as `settings` demand; LoRAAdapters go to `adapters`."""
        self.streams = streams
        self._observer = observer
        self._reconciler = reconciler
        self._settings = settings
        self._queue = WorkQueue()
        self._adapters = adapters
        self.wake_adapters: Callable[[Key], None] = _ignore
        """Called with the key of each InferenceService that an event concerns."""
        self.startups = StartupReader(observer, self.enqueue, enabled=settings.read_startup_phases)
        self._resynced_at = time.monotonic()
        self._started = False
        metrics.queue_depth.set_function(lambda: len(self._queue))

    def on_event(self, kind: Kind, event: Event, obj: dict[str, Any]) -> None:
        """Handle an object of a list or a watch event, and queue the InferenceServices that it concerns."""
        try:
            if kind == LORA_ADAPTER:
                for key in self._adapters.observe(event, obj):
                    self.wake_adapters(key)
                return
            requests = (self._observer.observe_new_owner(kind, obj), self._observer.observe(kind, obj, event))
        except Exception:  # a bug with one object must not end the watch of all others  # noqa: BLE001
            logger.exception(
                "event not understood", extra={"object": str(obj.get("metadata", {}).get("name"))}
            )
            return
        for request in requests:
            if request is not None:
                self.enqueue(request)
                self.wake_adapters(request.key)
                if request.started is not None:
                    self.startups.begin(request.key, request.started)

    def on_listed(self, stream: StreamKey, shown: set[str], resource_version: int) -> None:
        """Handle the end of a list; after the last list of a namespace, start to reconcile it."""
        if stream.kind == LORA_ADAPTER:
            for key in self._adapters.observe_list_end(stream, shown, resource_version):
                self.wake_adapters(key)
        else:
            for request in self._observer.observe_list_end(stream, shown, resource_version):
                self.enqueue(request)
        if self.streams.listed(stream):
            self._start(stream.namespace)

    def _start(self, scope: str | None) -> None:
        """Queue every InferenceService of a scope once all its kinds are listed."""
        logger.info("synced", extra={"namespace": scope or "all"})
        if not self._started:
            self._started = True
            metrics.last_resync.set_to_current_time()
            self._resynced_at = time.monotonic()
        for key in self._observer.cache:
            if self._settings.watch_scope(key[0]) == scope:
                self._queue.add(key, Stage.CHILDREN)

    def unhealthy(self) -> str:
        """Return the reason for a restart of the process; empty when it works, or waits to become the leader."""
        now = time.monotonic()
        limit = self._settings.stale_after_seconds
        if self._started and now - self._resynced_at > limit:
            return f"the last resync was {now - self._resynced_at:.0f} s ago"
        if self._queue.overdue_seconds() > limit + max(STAGE_DEADLINE_SECONDS.values()):
            return f"work has been waiting for {self._queue.overdue_seconds():.0f} s"
        return self.streams.dead()

    async def work(self) -> None:
        """Reconcile keys of the queue for ever; any number of workers may run."""
        while True:
            key = await self._queue.get()
            started = time.perf_counter()
            result = await self._reconcile_one(key)
            metrics.reconciles.labels(result).inc()
            metrics.reconcile_duration.observe(time.perf_counter() - started)

    async def resync(self) -> None:
        """Queue every InferenceService periodically, from the cache, in case an event was lost."""
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            if not self._started:
                continue
            for key in self._observer.cache:
                if self.streams.synced(key[0]):
                    self._queue.refresh(key, Stage.STATUS)
            for key in self._observer.observe_resync():
                if self.streams.synced(key[0]):
                    self._queue.add(
                        key, Stage.CHILDREN
                    )  # also one that backs off because its names are taken
            self._resynced_at = time.monotonic()
            metrics.last_resync.set_to_current_time()

    async def _reconcile_one(self, key: Key) -> str:
        """Reconcile one key. It goes back to the queue whatever happens."""
        extra = {"object": "/".join(key)}
        try:
            outcome = await self._reconciler.reconcile(key)
        except Retryable as error:
            logger.warning("reconcile will be retried", extra={**extra, "error": str(error)})
            self._queue.done(key, failed=True, retry_after_seconds=error.retry_after_seconds)
            return "retry"
        except OperatorError as error:
            logger.error("reconcile was refused", extra={**extra, "error": str(error)})
            self._queue.done(key, failed=True)
            return "refused"
        except Exception:  # a bug with one object must not stop the others  # noqa: BLE001
            logger.exception("reconcile failed", extra=extra)
            self._queue.done(key, failed=True)
            return "bug"
        if outcome.stage is not None:
            self.enqueue(ReconcileRequest(key, outcome.stage))
        elif outcome.again_seconds:
            self._queue.add(key, Stage.STATUS, outcome.again_seconds)
        self._queue.done(key, failed=outcome.refused, partial=outcome.stage is not None)
        return "refused" if outcome.refused else "done"

    def enqueue(self, request: ReconcileRequest) -> None:
        """Queue a key, unless its namespace is not listed yet: the end of the list will queue it."""
        if not self.streams.synced(request.key[0]):
            return
        if request.edited:
            self._queue.forget(request.key)
        late = request.stage == Stage.STATUS
        delay = self._settings.status_delay_seconds if late else 0.0
        self._queue.add(request.key, request.stage, delay)


def _ignore(key: Key) -> None:
    """Do nothing."""
