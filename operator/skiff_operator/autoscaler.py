"""The autoscaler: reads the load of the pods of each autoscaled service, and writes the number of pods that the planner decides.

Only the leader runs it. Each service is looked at once in every interval, and left out while its last look goes on, so that
pods which do not answer delay no other service. Services without autoscaling cost a look at the cache.

The number is written to `spec.replicas` by the subresource `scale`, at the version of the InferenceService that the cache
holds. If another client, such as a router with waiting requests, has written meanwhile, the write is refused and the next
look decides anew. The history of loads is not kept beyond the leader: a new one begins with an empty memory, and removes no
pods before it has watched for the whole delay.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from skiff_operator import autoscaling, metrics, pod_load, status
from skiff_operator.apply import Applier, clock
from skiff_operator.autoscaling import Decision, Memory, Observation, PodLoad
from skiff_operator.cache import Cache, Entry
from skiff_operator.client import MERGE_PATCH, Client
from skiff_operator.errors import ApiConflict, ApiNotFound, OperatorError
from skiff_operator.events import Announcement
from skiff_operator.kinds import INFERENCE_SERVICE, Stage
from skiff_operator.log import logger
from skiff_operator.observe import ReconcileRequest
from skiff_operator.pod_load import LoadHistory
from skiff_operator.pod_metrics import MetricsReader
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.settings import Settings
from skiff_operator.status import Scaling
from skiff_operator.workload import PodState
from skiff_operator.workqueue import Key

MAX_PODS: Final = 1024
"""Pods of one service that are read; the load of the others is taken to be the same."""
_CONNECTIONS: Final = 64
_SERVICES: Final = 32
"""Services that are looked at at the same time."""
_RETRY_SECONDS: Final = 10.0


class _Service(msgspec.Struct):
    """The history of one service.

    `replicas`: the number of pods at the last look, None before the first. `version`: the resource version of the last
    write. `not_before`: the time until which a refused write is not repeated.
    """

    uid: str
    memory: Memory = msgspec.field(default_factory=Memory)
    pods: dict[str, LoadHistory] = msgspec.field(default_factory=dict)
    replicas: int | None = None
    version: int = 0
    not_before: float = 0.0


class Autoscaler:
    """Decides the numbers of pods of all autoscaled services."""

    def __init__(
        self,
        cache: Cache,
        client: Client,
        applier: Applier,
        enqueue: Callable[[ReconcileRequest], None],
        settings: Settings,
    ) -> None:
        """Look at the services in `cache`, write through `client`, and send Events by `applier`."""
        self._cache = cache
        self._client = client
        self._applier = applier
        self._enqueue = enqueue
        self._seconds = settings.autoscaling_seconds
        self._reader = MetricsReader(connections=_CONNECTIONS)
        self._slots = asyncio.Semaphore(_SERVICES)
        self._services: dict[Key, _Service] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Decide for ever."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._look()
            await asyncio.sleep(max(0.0, began + self._seconds - loop.time()))

    async def close(self) -> None:
        """Cancel what goes on, and close the connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()

    def _look(self) -> None:
        """Begin to look at every autoscaled service that is not being looked at."""
        found = [key for key in self._cache if (entry := self._cache.get(key)) and entry.autoscaled]
        for key in self._services.keys() - found:
            del self._services[key]
        for key in found:
            if key not in self._tasks:
                task = asyncio.create_task(self._scale_one(key))
                self._tasks[key] = task
                task.add_done_callback(partial(self._end_look, key))

    def _end_look(self, key: Key, _: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)

    async def _scale_one(self, key: Key) -> None:
        async with self._slots:
            try:
                await self._scale(key)
            except Exception:  # a bug with one service must not stop the others  # noqa: BLE001
                logger.exception("autoscaling failed", extra={"object": "/".join(key)})

    async def _scale(self, key: Key) -> None:
        """Look at one service, and write another number of pods if it needs one."""
        entry = self._cache.get(key)
        if entry is None or entry.service is None:
            return
        service = self._services.get(key)
        if service is None or service.uid != entry.uid:
            service = self._services[key] = _Service(entry.uid)
        now = asyncio.get_running_loop().time()
        seen = entry.service
        loads = await self._read_loads(service, entry, now)
        entry = self._cache.get(key)
        if entry is None or not entry.autoscaled or entry.service != seen or now < service.not_before:
            return  # it was edited or deleted meanwhile
        if int(entry.resource_version) < service.version:
            return  # the event of the last write is on the way
        policy = seen.spec.autoscaling
        assert policy is not None, "it is autoscaled"
        replicas = seen.spec.replicas
        if service.replicas is not None and service.replicas != replicas:
            self._record(
                key, entry, replicas, f"set by the subresource scale or an edit; it was {service.replicas}"
            )
            await self._announce(
                key, entry, service.replicas, replicas, "by the subresource scale or an edit"
            )
        service.replicas = replicas
        decision = autoscaling.decide(policy, _observe(entry, loads, now), service.memory)
        if decision.replicas != replicas:
            await self._write(key, entry, service, decision, now)

    async def _read_loads(self, service: _Service, entry: Entry, now: float) -> list[PodLoad | None]:
        """Return the load of each pod that serves; None for one that does not answer."""
        pods = _serving(entry)[:MAX_PODS]
        pages = await self._reader.read([pod.ip for pod in pods], pod_load.read)
        service.pods = {pod.uid: service.pods.get(pod.uid) or LoadHistory() for pod in pods}
        loads = [
            None if page is None else service.pods[pod.uid].add(now, page)
            for pod, page in zip(pods, pages, strict=True)
        ]
        answered = sum(load is not None for load in loads)
        metrics.load_readings.labels("answered").inc(answered)
        metrics.load_readings.labels("silent").inc(len(loads) - answered)
        return loads

    async def _write(self, key: Key, entry: Entry, service: _Service, decision: Decision, now: float) -> None:
        """Write the number of pods; a failure is logged, and a later look decides anew."""
        assert entry.service is not None, "it is autoscaled"
        before, uid = entry.service.spec.replicas, entry.uid
        body = {
            "metadata": {"resourceVersion": entry.resource_version},
            "spec": {"replicas": decision.replicas},
        }
        path = INFERENCE_SERVICE.path(*key, subresource="scale")
        try:
            written = await self._client.request(
                "PATCH", path, body, query={"fieldManager": FIELD_MANAGER}, content_type=MERGE_PATCH
            )
        except (ApiConflict, ApiNotFound):
            return  # its event is on the way
        except OperatorError as error:
            service.not_before = now + _RETRY_SECONDS
            logger.warning("not scaled", extra={"object": "/".join(key), "error": str(error)})
            return
        service.replicas, service.version = decision.replicas, int(written["metadata"]["resourceVersion"])
        metrics.scalings.labels("up" if decision.replicas > before else "down").inc()
        entry = self._cache.get(key) or entry
        if entry.uid == uid:
            self._record(key, entry, decision.replicas, decision.reason)
            await self._announce(key, entry, before, decision.replicas, decision.reason)

    def _record(self, key: Key, entry: Entry, replicas: int, message: str) -> None:
        """Let the next status show a change of the number of pods."""
        entry.scaling = Scaling(replicas, message, clock())
        self._enqueue(ReconcileRequest(key, Stage.STATUS))

    async def _announce(self, key: Key, entry: Entry, before: int, after: int, reason: str) -> None:
        """Log a change of the number of pods, and send the Event of it."""
        verb = "ScaledUp" if after > before else "ScaledDown"
        note = f"from {before} to {after} pods: {reason}"
        logger.info("scaled", extra={"object": "/".join(key), "change": note})
        await self._applier.announce(key, entry.uid, Announcement("Normal", verb, note))


def _live(entry: Entry) -> list[PodState]:
    return sorted((pod for pod in entry.pods.values() if status.is_live(pod)), key=lambda pod: pod.name)


def _serving(entry: Entry) -> list[PodState]:
    return [pod for pod in _live(entry) if pod.ready and pod.ip]


def _observe(entry: Entry, loads: list[PodLoad | None], now: float) -> Observation:
    """Collect what the planner needs to know. A pod that does not exist yet counts as one that starts."""
    assert entry.service is not None, "it is autoscaled"
    live, replicas = _live(entry), entry.service.spec.replicas
    blocked = entry.problem is not None or (entry.rollout is not None and bool(entry.rollout.blocked))
    missing = max(0, replicas - len(live))
    starting = [pod for pod in live if not pod.ready]
    failing = sum(bool(pod.trouble) for pod in starting)
    answers = tuple(load for load in loads if load is not None)
    startup = entry.status.startup if entry.status is not None else None
    return Observation(
        now=now,
        replicas=replicas,
        loads=answers,
        silent=len(loads) - len(answers),
        unread=max(0, len(_serving(entry)) - len(loads)),
        loading=len(starting) - failing + (0 if blocked else missing),
        failing=failing + (missing if blocked else 0),
        rolling_out=len({pod.revision for pod in live}) > 1,
        start_seconds=(startup.ready_seconds or 0.0) if startup is not None else 0.0,
    )
