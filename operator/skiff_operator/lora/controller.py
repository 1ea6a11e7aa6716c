"""The controller of LoRA adapters: brings the adapters of running pods closer to what InferenceServices and LoRAAdapters say.

Each pass over one InferenceService observes (what its ready pods list), plans (pure, `plan`) and applies: loads and unloads by
requests to the pods, the ConfigMap with which new pods start, and the statuses. Requests to pods go on in the background, so
that a slow download delays nothing else; when one ends, the next pass sees it. Only InferenceServices with `spec.lora`, and
those that LoRAAdapters name, are looked at: when an event concerns them, and in each resync.

Between passes it keeps only the failed loads and the files that this process had each pod load. After a restart of the operator,
the pods list their adapters.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from skiff_operator import metrics, ownership, status
from skiff_operator.apply import clock
from skiff_operator.cache import Cache, Entry
from skiff_operator.client import Client
from skiff_operator.errors import ApiConflict, ApiNotFound, ApiRefused, OperatorError, Permanent
from skiff_operator.kinds import CONFIG_MAP, LORA_ADAPTER, POD, Stage
from skiff_operator.log import logger
from skiff_operator.lora import fetcher, plan, report
from skiff_operator.lora.admin_keys import AdminKeys, digest
from skiff_operator.lora.index import Index
from skiff_operator.lora.plan import Attempt, DesiredAdapter, Fault, PodAdapters, Step
from skiff_operator.lora.pod_client import PodClient
from skiff_operator.lora.spec import LoRAAdapter
from skiff_operator.observe import ReconcileRequest
from skiff_operator.resources import lora_config
from skiff_operator.settings import Settings
from skiff_operator.spec import Adapter, InferenceService
from skiff_operator.status import AdapterStatus, Problem
from skiff_operator.workload import PodState
from skiff_operator.workqueue import Key

MAX_PODS: Final = 1024
"""Pods of one InferenceService that are looked at."""
_SERVICES: Final = 16
"""InferenceServices that are looked at at the same time."""
_REQUESTS: Final = 64
"""Loads and unloads at the same time."""
_REQUESTS_OF_SERVICE: Final = 16
"""Those of one InferenceService, so that slow downloads of one do not hold up the others."""
_REQUESTS_OF_POD: Final = 2
_MAX_FETCHERS: Final = 5
"""Pods that may be created for one adapter's download: one that is evicted, for example, is replaced by another one."""
_COLLECT_SECONDS: Final = 0.2
"""Events of this long cause one pass."""
_ACTIVE_SECONDS: Final = 2.0
"""Between passes while something changes."""
_RETRY_SECONDS: Final = 10.0


class _Pod(msgspec.Struct):
    """The state of one container of one pod.

    `loaded`: paths of adapters that this process loaded into it, by name; `attempts`: failed loads; `tasks`: requests in flight.
    """

    restarts: int
    loaded: dict[str, str] = msgspec.field(default_factory=dict)
    attempts: dict[str, Attempt] = msgspec.field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = msgspec.field(default_factory=dict)


class _Service(msgspec.Struct):
    """The pods of one InferenceService by their uids, the time of the next pass, and the pass that goes on.

    `requests` bounds the loads and unloads in flight.
    """

    due_at: float = 0.0
    pods: dict[str, _Pod] = msgspec.field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    requests: asyncio.Semaphore = msgspec.field(
        default_factory=lambda: asyncio.Semaphore(_REQUESTS_OF_SERVICE)
    )


class LoRAController:
    """Manages the adapters of all InferenceServices."""

    def __init__(
        self,
        cache: Cache,
        index: Index,
        client: Client,
        enqueue: Callable[[ReconcileRequest], None],
        settings: Settings,
        *,
        synced: Callable[[str], bool],
    ) -> None:
        """Look at the services in `cache` and `index`, of namespaces that are `synced`, and write through `client`."""
        self._cache = cache
        self._index = index
        self._client = client
        self._enqueue = enqueue
        self._resync_seconds = settings.resync_seconds
        self._synced = synced
        self._keys = AdminKeys(client, settings)
        self._settings = settings
        self._pods = PodClient()
        self._services: dict[Key, _Service] = {}
        self._wanted = asyncio.Event()
        self._slots = asyncio.Semaphore(_SERVICES)
        self._requests = asyncio.Semaphore(_REQUESTS)

    def wake(self, key: Key) -> None:
        """Look at a service soon, if it has to do with adapters."""
        service = self._services.get(key)
        if service is None and key not in self._cache.lora and key not in self._index:
            return
        if service is None:
            service = self._services[key] = _Service()
        service.due_at = min(service.due_at, asyncio.get_running_loop().time() + _COLLECT_SECONDS)
        self._wanted.set()

    async def run(self) -> None:
        """Make passes for ever."""
        loop = asyncio.get_running_loop()
        while True:
            for key in sorted({*self._cache.lora, *self._index.services()}):
                self._services.setdefault(key, _Service())
            now = loop.time()
            for key, service in list(self._services.items()):
                if service.due_at <= now and service.task is None:
                    self._begin(key, service)
            idle = [each.due_at for each in self._services.values() if each.task is None]
            seconds = max(0.05, min(idle, default=now + self._resync_seconds) - now)
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), seconds)

    async def close(self) -> None:
        """Cancel what goes on, and close the connections."""
        tasks = [each.task for each in self._services.values() if each.task is not None]
        tasks += [
            task
            for each in self._services.values()
            for pod in each.pods.values()
            for task in pod.tasks.values()
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pods.close()

    def _begin(self, key: Key, service: _Service) -> None:
        service.due_at = asyncio.get_running_loop().time() + self._resync_seconds
        service.task = asyncio.create_task(self._pass(key, service))
        service.task.add_done_callback(partial(self._end, key, service))

    def _end(self, key: Key, service: _Service, _: asyncio.Task[None]) -> None:
        service.task = None
        if key not in self._cache.lora and key not in self._index:
            for pod in service.pods.values():
                _cancel(pod)
            self._services.pop(key, None)
        self._wanted.set()

    def _again(self, service: _Service, seconds: float) -> None:
        service.due_at = min(service.due_at, asyncio.get_running_loop().time() + seconds)

    async def _pass(self, key: Key, service: _Service) -> None:
        async with self._slots:
            try:
                await self._reconcile(key, service)
            except OperatorError as error:
                logger.warning(
                    "adapters will be retried", extra={"object": "/".join(key), "error": str(error)}
                )
                self._again(service, max(_RETRY_SECONDS, getattr(error, "retry_after_seconds", 0.0)))
            except Exception:  # a bug with one service must not stop the others  # noqa: BLE001
                logger.exception("the pass over adapters failed", extra={"object": "/".join(key)})

    async def _reconcile(self, key: Key, service: _Service) -> None:
        """Observe, plan and apply once."""
        if not self._synced(key[0]):
            self._again(service, _ACTIVE_SECONDS)
            return
        entry = self._cache.get(key)
        found = entry.service if entry is not None and entry.present and not entry.deleting else None
        adapters = self._index.of(key)
        if entry is None or found is None:
            await self._report(
                key,
                None,
                adapters,
                [plan.status(each, []) for each in plan.adapters_without_service(adapters)],
            )
            return
        wanted = plan.desired_adapters(found, adapters)
        if found.spec.lora is None:
            await self._report(key, None, adapters, [plan.status(each, []) for each in wanted])
            return
        admin_key = await self._keys.key(*key, entry.uid)
        try:
            started_with = await self._read_config(found, admin_key)
        except Permanent as error:
            problem = Problem(error.reason, str(error))
            refused = [msgspec.structs.replace(each, problem=problem) for each in wanted]
            await self._report(key, entry, adapters, [plan.status(each, []) for each in refused])
            raise
        wanted = await self._fetch(found, service, wanted, adapters)
        pods = _serving(entry)[:MAX_PODS]
        self._forget(service, pods)
        views = await self._observe(service, pods, admin_key)
        if self._apply(key, service, pods, views, wanted, admin_key):
            self._again(service, _ACTIVE_SECONDS)
        now_started_with = _started_with(wanted, views, started_with)
        if now_started_with != started_with:
            await self._write_config(found, admin_key, now_started_with)
        statuses = [plan.status(each, views) for each in wanted]
        self._plan_retry(service)
        await self._report(key, entry, adapters, statuses)

    async def _fetch(
        self,
        found: InferenceService,
        service: _Service,
        wanted: list[DesiredAdapter],
        adapters: list[LoRAAdapter],
    ) -> list[DesiredAdapter]:
        """Let fetchers download the adapters that need credentials; return all adapters, those as awaited that are not complete."""
        by_name = {each.name: each for each in adapters if each.spec.credentials_secret_ref is not None}
        result = []
        for each in wanted:
            adapter = by_name.get(each.source)
            problem = await self._fetch_one(found, adapter) if adapter and each.problem is None else None
            if problem is not None:
                each = plan.awaiting(each, problem)
                self._again(service, _ACTIVE_SECONDS)
            result.append(each)
        return result

    async def _fetch_one(self, found: InferenceService, adapter: LoRAAdapter) -> Problem | None:
        """Make the fetcher of an adapter if there is none; return why its files are not there yet, or None if they are."""
        failed_uid = ""
        for _ in range(_MAX_FETCHERS):
            name = fetcher.name(found, adapter, failed_uid)
            try:
                live = await self._client.get(POD, adapter.namespace, name)
            except ApiNotFound:
                try:
                    live = await self._client.create(
                        POD, adapter.namespace, fetcher.build(found, adapter, self._settings, failed_uid)
                    )
                except ApiRefused as error:
                    return Problem("FetchFailed", str(error))
            if not fetcher.is_own(live, adapter):
                return Problem("NameConflict", f"pod {name} exists and is not this LoRAAdapter's; delete it")
            if not fetcher.has_failed(live):
                return fetcher.progress(live)
            failed_uid = live["metadata"]["uid"]
        return fetcher.progress(live)

    def _forget(self, service: _Service, pods: list[PodState]) -> None:
        """Drop the state of pods that are gone and of containers that have ended: a new container has no adapter yet."""
        present = {pod.uid: pod for pod in pods}
        for uid, known in list(service.pods.items()):
            if uid not in present or known.restarts != present[uid].restarts:
                _cancel(known)
                del service.pods[uid]
        for uid, pod in present.items():
            service.pods.setdefault(uid, _Pod(pod.restarts))

    async def _observe(self, service: _Service, pods: list[PodState], admin_key: str) -> list[PodAdapters]:
        """Ask all ready pods for their adapters."""
        answers = await asyncio.gather(*(self._pods.list(pod.ip, admin_key) for pod in pods))
        views = []
        for pod, answer in zip(pods, answers, strict=True):
            known = service.pods[pod.uid]
            fault = answer if isinstance(answer, Fault) else None
            listed = None if isinstance(answer, Fault) else answer
            for name in list(known.attempts):
                if listed is not None and listed.get(name) == known.attempts[name].path:
                    del known.attempts[name]
            views.append(PodAdapters(pod.name, listed, known.loaded, known.attempts, fault))
        return views

    def _apply(
        self,
        key: Key,
        service: _Service,
        pods: list[PodState],
        views: list[PodAdapters],
        wanted: list[DesiredAdapter],
        admin_key: str,
    ) -> bool:
        """Begin the next requests to each pod; return whether anything changes."""
        now = asyncio.get_running_loop().time()
        changing = False
        for pod, view in zip(pods, views, strict=True):
            if view.listed is None:
                changing = True
                continue
            known = service.pods[pod.uid]
            steps = plan.steps(wanted, view.listed, known.loaded, known.attempts, known.tasks, now)
            for step in steps[: max(0, _REQUESTS_OF_POD - len(known.tasks))]:
                task = asyncio.create_task(self._take(key, service, known, pod, step, admin_key))
                known.tasks[step.name] = task
                task.add_done_callback(partial(_done, known, step.name))
            changing |= bool(known.tasks)
        return changing

    async def _take(
        self, key: Key, service: _Service, known: _Pod, pod: PodState, step: Step, admin_key: str
    ) -> None:
        """Send one request to a pod, and keep its result for the next pass."""
        # Whatever comes of the request, the pod may no longer serve that path.
        known.loaded.pop(step.name, None)
        async with service.requests, self._requests:
            if step.action == "unload":
                fault = await self._pods.unload(pod.ip, admin_key, step.name)
            else:
                fault = await self._pods.load(pod.ip, admin_key, step.name, step.path, replace=step.replace)
        extra = {"object": "/".join(key), "pod": pod.name, "adapter": step.name}
        result = "done" if fault is None else "refused" if fault.permanent else "failed"
        metrics.adapter_requests.labels(step.action, result).inc()
        if fault is not None:
            logger.warning(f"adapter not {step.action}ed", extra={**extra, "error": fault.message})
            last = known.attempts.get(step.name)
            times = last.times + 1 if last is not None and last.path == step.path else 1
            at = asyncio.get_running_loop().time()
            known.attempts[step.name] = Attempt(step.path, fault, times, at)
        else:
            logger.info(f"adapter {step.action}ed", extra=extra)
            known.attempts.pop(step.name, None)
            if step.action == "load":
                known.loaded[step.name] = step.path
        self._again(service, _COLLECT_SECONDS)
        self._wanted.set()

    def _plan_retry(self, service: _Service) -> None:
        """Look at the service again when the next failed load may be repeated."""
        now = asyncio.get_running_loop().time()
        times = [each.not_before for pod in service.pods.values() for each in pod.attempts.values()]
        if times:
            self._again(service, max(_ACTIVE_SECONDS, min(times) - now))

    async def _read_config(self, found: InferenceService, admin_key: str) -> list[Adapter]:
        """Return the adapters with which new pods start; the ConfigMap is made, or gets the present key, if need be."""
        name = lora_config.name(found.name)
        try:
            live = await self._client.get(CONFIG_MAP, found.namespace, name)
        except ApiNotFound:
            body = lora_config.build(found, digest(admin_key), [])
            live = await self._client.create(CONFIG_MAP, found.namespace, body)
        ownership.require_owned(CONFIG_MAP, live, service=found.name, uid=found.uid)
        known, adapters = lora_config.read(live)
        if known != digest(admin_key):
            await self._replace_config(live, lora_config.build(found, digest(admin_key), adapters))
        return list(adapters)

    async def _write_config(self, found: InferenceService, admin_key: str, adapters: list[Adapter]) -> None:
        live = await self._client.get(CONFIG_MAP, found.namespace, lora_config.name(found.name))
        ownership.require_owned(CONFIG_MAP, live, service=found.name, uid=found.uid)
        await self._replace_config(live, lora_config.build(found, digest(admin_key), adapters))

    async def _replace_config(self, live: dict[str, Any], made: dict[str, Any]) -> None:
        """Replace the data of a ConfigMap at the version that was read; what others have added elsewhere stays."""
        meta = live["metadata"]
        await self._client.replace(
            CONFIG_MAP, meta["namespace"], meta["name"], {**live, "data": made["data"]}
        )

    async def _report(
        self,
        key: Key,
        entry: Entry | None,
        adapters: list[LoRAAdapter],
        statuses: list[AdapterStatus],
    ) -> None:
        """Report on the InferenceService, by its next status, and on each of the LoRAAdapters that `statuses` are about.

        The API server refuses the status of one that was changed meanwhile.
        """
        if entry is not None and tuple(statuses) != entry.last_adapters:
            entry.adapters = tuple(statuses)
            self._enqueue(ReconcileRequest(key, Stage.STATUS))
        elif entry is not None:
            entry.adapters = tuple(statuses)
        by_source = {each.source: each for each in statuses if each.source}
        for adapter in adapters:
            found = by_source.get(adapter.name)
            if found is None:
                continue
            new = report.object_status(found, adapter.generation, adapter.status, clock())
            if new == adapter.status:
                continue
            body = {
                "apiVersion": LORA_ADAPTER.api_version,
                "kind": LORA_ADAPTER.name,
                "metadata": {
                    "name": adapter.name,
                    "uid": adapter.uid,
                    "resourceVersion": adapter.resource_version,
                },
                "status": msgspec.to_builtins(new),
            }
            with contextlib.suppress(ApiNotFound, ApiConflict):  # its event is on the way
                live = await self._client.apply(
                    LORA_ADAPTER, adapter.namespace, adapter.name, body, subresource="status"
                )
                self._index.observe_status(adapter.uid, live["metadata"]["resourceVersion"], new)


def _serving(entry: Entry) -> list[PodState]:
    """Return the ready pods, in the order of their names."""
    found = [pod for pod in entry.pods.values() if status.is_live(pod) and pod.ready and pod.ip]
    return sorted(found, key=lambda pod: pod.name)


def _started_with(
    wanted: list[DesiredAdapter], views: list[PodAdapters], before: list[Adapter]
) -> list[Adapter]:
    """Return the adapters with which new pods start; if no pod answers, the earlier ones that are still wanted."""
    if not any(view.listed is not None for view in views):
        valid = {(each.name, each.path) for each in wanted if each.problem is None}
        return [each for each in before if (each.name, each.uri) in valid]
    return plan.startup_adapters(wanted, views)


def _done(pod: _Pod, name: str, task: asyncio.Task[None]) -> None:
    if pod.tasks.get(name) is task:
        del pod.tasks[name]


def _cancel(pod: _Pod) -> None:
    for task in pod.tasks.values():
        task.cancel()
