"""The controller: watch events put keys into the queue, workers take them out, the resync puts keys back."""

import asyncio
import time
from typing import Any

from skiff_operator import metrics
from skiff_operator.errors import OperatorError, Retryable
from skiff_operator.kinds import Kind, Stage
from skiff_operator.log import logger
from skiff_operator.observe import Attention, Observer
from skiff_operator.reconcile import Reconciler
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import Event, StreamKey, WatchStreams
from skiff_operator.workqueue import PATIENCE_SECONDS, Key, WorkQueue


class Controller:
    """Connects events, the queue and the reconciler."""

    def __init__(
        self, observer: Observer, reconciler: Reconciler, streams: WatchStreams, settings: Settings
    ) -> None:
        """Work as `settings` say, on namespaces whose `streams` are synced."""
        self.streams = streams
        self._observer = observer
        self._reconciler = reconciler
        self._settings = settings
        self._queue = WorkQueue()
        self._resynced_at = time.monotonic()
        self._started = False
        metrics.queue_depth.set_function(lambda: len(self._queue))

    def on_event(self, kind: Kind, event: Event, obj: dict[str, Any]) -> None:
        """Take in an object that a list or a watch showed, and queue what it concerns."""
        try:
            attentions = (self._observer.moved(kind, obj), self._observer.fold(kind, obj, event))
        except Exception:  # one object's bug must not end the watch of all others  # noqa: BLE001
            logger.exception(
                "event not understood", extra={"object": str(obj.get("metadata", {}).get("name"))}
            )
            return
        for attention in attentions:
            if attention is not None:
                self._attend(attention)

    def on_listed(self, stream: StreamKey, shown: set[str], resource_version: int) -> None:
        """Take in the end of a list; at the end of the last one of a namespace, begin to work on it."""
        for attention in self._observer.listed(stream, shown, resource_version):
            self._attend(attention)
        if self.streams.listed(stream):
            self._start(stream.namespace)

    def _start(self, scope: str | None) -> None:
        """Look at every InferenceService of a scope once: all of it has been listed."""
        logger.info("synced", extra={"namespace": scope or "all"})
        if not self._started:
            self._started = True
            metrics.last_resync.set_to_current_time()
            self._resynced_at = time.monotonic()
        for key in self._observer.cache:
            if self._settings.watch_scope(key[0]) == scope:
                self._queue.add(key, Stage.CHILDREN)

    def unhealthy(self) -> str:
        """Why the process should be restarted; empty when it works, or waits for its turn to lead."""
        now = time.monotonic()
        limit = self._settings.stale_after_seconds
        if self._started and now - self._resynced_at > limit:
            return f"the last resync was {now - self._resynced_at:.0f} s ago"
        if self._queue.overdue_seconds() > limit + max(PATIENCE_SECONDS.values()):
            return f"work has been waiting for {self._queue.overdue_seconds():.0f} s"
        return self.streams.dead()

    async def work(self) -> None:
        """Reconcile one key after the other, for ever; any number of these may run."""
        while True:
            key = await self._queue.get()
            started = time.perf_counter()
            result = await self._turn(key)
            metrics.reconciles.labels(result).inc()
            metrics.reconcile_duration.observe(time.perf_counter() - started)

    async def resync(self) -> None:
        """Look at everything again every so often, from the cache, in case an event was lost."""
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            if not self._started:
                continue
            for key in self._observer.cache:
                if self.streams.synced(key[0]):
                    self._queue.refresh(key, Stage.STATUS)
            self._resynced_at = time.monotonic()
            metrics.last_resync.set_to_current_time()

    async def _turn(self, key: Key) -> str:
        """One reconcile. The key goes back to the queue whatever happens."""
        extra = {"object": "/".join(key)}
        try:
            outcome = await self._reconciler.reconcile(key)
        except Retryable as error:
            logger.warning("reconcile will be retried", extra={**extra, "error": str(error)})
            self._queue.done(key, failed=True)
            return "retry"
        except OperatorError as error:
            logger.error("reconcile was refused", extra={**extra, "error": str(error)})
            self._queue.done(key, failed=True)
            return "refused"
        except Exception:  # one object's bug must not stop the others' work  # noqa: BLE001
            logger.exception("reconcile failed", extra=extra)
            self._queue.done(key, failed=True)
            return "bug"
        if outcome.stage is not None:
            self._attend(Attention(key, outcome.stage))
        self._queue.done(key, failed=outcome.refused, partial=outcome.stage is not None)
        return "refused" if outcome.refused else "done"

    def _attend(self, attention: Attention) -> None:
        """Queue a key, unless its namespace is not listed yet: it is looked at when it is."""
        if not self.streams.synced(attention.key[0]):
            return
        if attention.edited:
            self._queue.forget(attention.key)
        late = attention.stage == Stage.STATUS
        delay = self._settings.status_delay_seconds if late else 0.0
        self._queue.add(attention.key, attention.stage, delay)
