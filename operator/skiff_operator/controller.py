"""The engine: workers that take keys from the queue, and the resync that puts keys there again."""

import asyncio
import time

from skiff_operator import metrics
from skiff_operator.errors import OperatorError, Retryable
from skiff_operator.kinds import Kind, Stage
from skiff_operator.log import logger
from skiff_operator.observe import Attention, Event, Observer
from skiff_operator.reconcile import Reconciler
from skiff_operator.settings import Settings
from skiff_operator.workqueue import PATIENCE_SECONDS, Key, WorkQueue


class Controller:
    """Connects events, the queue and the reconciler."""

    def __init__(self, observer: Observer, reconciler: Reconciler, settings: Settings) -> None:
        """Work as `settings` say."""
        self._observer = observer
        self._reconciler = reconciler
        self._settings = settings
        self._queue = WorkQueue()
        self._resynced_at = time.monotonic()
        self._started = False
        metrics.queue_depth.set_function(lambda: len(self._queue))

    def start(self) -> None:
        """Everything was listed: look at every InferenceService once."""
        self._started = True
        metrics.last_resync.set_to_current_time()
        self._resynced_at = time.monotonic()
        for key in self._observer.cache:
            self._queue.add(key, Stage.CHILDREN)

    def on_event(self, kind: Kind, event: Event, obj: dict[str, object]) -> None:
        """Take in a watch event and queue what it concerns."""
        if event == "LISTED":
            uid: str = obj["metadata"]["uid"]  # type: ignore[index]  # every object has metadata
            self._observer.relisted(kind, uid, time.monotonic())
        attention = self._observer.fold(kind, obj, event)
        if attention is not None:
            self._attend(attention)

    def unhealthy(self) -> str:
        """Why the process should be restarted; empty when it works, or waits for its turn to lead."""
        now = time.monotonic()
        limit = self._settings.stale_after_seconds
        if self._started and now - self._resynced_at > limit:
            return f"the last resync was {now - self._resynced_at:.0f} s ago"
        if self._queue.overdue_seconds() > limit + max(PATIENCE_SECONDS.values()):
            return f"work has been waiting for {self._queue.overdue_seconds():.0f} s"
        return ""

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
            for attention in self._observer.sweep(time.monotonic()):
                self._attend(attention)
            for key in self._observer.cache:
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
        if attention.edited:
            self._queue.forget(attention.key)
        late = attention.stage == Stage.STATUS
        delay = self._settings.status_delay_seconds if late else 0.0
        self._queue.add(attention.key, attention.stage, delay)
