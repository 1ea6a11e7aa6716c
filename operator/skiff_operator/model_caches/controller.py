"""The controller of ModelCaches: one loop that lists them with their pods and volumes, and takes the next steps.

It polls instead of watching: caches are few and change over minutes, and a list of each kind is all that it costs. The
state of a cache is what its pods and volumes show; only `unusedSince` is remembered, in the status.
"""

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import aiohttp
import msgspec

from skiff_operator.apply import clock
from skiff_operator.cache import Cache
from skiff_operator.client import MERGE_PATCH, Client
from skiff_operator.errors import (
    ApiAlreadyExists,
    ApiConflict,
    ApiNotFound,
    ApiRefused,
    InvalidSpec,
    OperatorError,
)
from skiff_operator.kinds import CLAIM, MODEL_CACHE, NODE, PERSISTENT_VOLUME, POD, SECRET, Kind
from skiff_operator.log import logger
from skiff_operator.model_caches import claim, fan_out, fetcher, nodes, prefetch, report, spec, volume
from skiff_operator.model_caches.fetcher import FETCH, REMOVE, Fetcher
from skiff_operator.model_caches.index import Index
from skiff_operator.model_caches.nodes import Node
from skiff_operator.model_caches.report import Facts, Progress
from skiff_operator.model_caches.spec import FINALIZER, ModelCache
from skiff_operator.model_caches.volume import Volume
from skiff_operator.resources import model_cache_claim
from skiff_operator.resources.metadata import label_selector
from skiff_operator.response_body import read_body
from skiff_operator.settings import Settings
from skiff_operator.workqueue import Key
from skiff_runtime import contract

ACTIVE_SECONDS: Final = 2.0
"""Between two passes while something changes; otherwise there are two passes in one resync."""
NODES_SECONDS: Final = 60.0
"""A list of nodes is used for this long; a list of thousands is large."""
PROGRESS_SECONDS: Final = 5.0
"""Between two writes of a status in which only the progress has changed."""
_PARALLEL_REQUESTS: Final = 16
_PROGRESS_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)
_MAX_PROGRESS_BYTES: Final = 64 << 10


class ModelCacheController:
    """Brings the nodes closer to the specs of all ModelCaches."""

    def __init__(
        self,
        client: Client,
        index: Index,
        services: Cache,
        settings: Settings,
        *,
        synced: Callable[[], bool],
    ) -> None:
        """Write through `client` and fill `index`; `services` are known completely once `synced` is true."""
        self._client = client
        self._index = index
        self._services = services
        self._settings = settings
        self._synced = synced
        self._nodes: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        self._complete: dict[str, Progress] = {}
        self._written_at: dict[str, float] = {}
        self._refused = ""

    async def run(self) -> None:
        """Make passes for ever; a failed one is logged and followed by the next."""
        async with aiohttp.ClientSession(timeout=_PROGRESS_TIMEOUT) as session:
            while True:
                changing = False
                try:
                    changing = await self._pass(session)
                    self._refused = ""
                except OperatorError as error:
                    if isinstance(error, ApiRefused):
                        self._index.give_up()
                    if str(error) != self._refused:
                        logger.warning("ModelCaches are not reconciled", extra={"error": str(error)})
                    self._refused = str(error)
                except Exception:  # a bug here must not stop the InferenceServices  # noqa: BLE001
                    logger.exception("the pass over ModelCaches failed")
                idle_seconds = self._settings.resync_seconds / 2
                wait_seconds = min(ACTIVE_SECONDS, idle_seconds) if changing else idle_seconds
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._index.wanted.wait(), wait_seconds)
                self._index.wanted.clear()

    async def _pass(self, session: aiohttp.ClientSession) -> bool:
        """Reconcile every ModelCache once; return whether something changes."""
        found = [obj async for obj in self._client.list(MODEL_CACHE, None, selector="")]
        caches: list[tuple[ModelCache, report.Status | None]] = []
        for obj in found:
            try:
                caches.append((spec.parse(obj), report.read(obj.get("status"))))
            except InvalidSpec as error:
                extra = {"object": obj["metadata"]["name"], "error": str(error)}
                logger.error("ModelCache not understood", extra=extra)
        self._index.replace(cache for cache, _ in caches)
        if not self._synced():
            return bool(caches)
        changing = await self._make_wanted({cache.name for cache, _ in caches})
        if not caches:
            return changing
        selector = contract.LABEL_MODEL_CACHE
        shared = any(cache.claim is not None for cache, _ in caches)
        namespace = None if shared else self._settings.lease_namespace
        pods = [pod async for pod in self._client.list(POD, namespace, selector=selector)]
        volumes = [
            volume.read(each) async for each in self._client.list(PERSISTENT_VOLUME, None, selector=selector)
        ]
        for cache, status in caches:
            try:
                own = [fetcher.read(pod) for pod in pods if fetcher.belongs(pod, cache, self._settings)]
                mine = [each for each in volumes if each.cache == cache.name]
                changing |= await self._reconcile(session, cache, status, own, mine)
            except OperatorError as error:
                extra = {"object": cache.name, "error": str(error)}
                logger.warning("ModelCache will be retried", extra=extra)
                changing = True
            except Exception:  # a bug with one ModelCache must not stop the others  # noqa: BLE001
                logger.exception("a ModelCache is not reconciled", extra={"object": cache.name})
        self._forget([cache for cache, _ in caches], {str(pod["metadata"]["uid"]) for pod in pods})
        return changing

    async def _make_wanted(self, existing: set[str]) -> bool:
        """Make the ModelCaches that InferenceServices with `cache.prefetch` have chosen; return whether there are any."""
        made = False
        for key in self._services:
            entry = self._services.get(key)
            service = entry.service if entry is not None and not entry.deleting else None
            if service is None or not service.spec.cache.prefetch or not service.mounted_cache.name:
                continue
            body = prefetch.build(service, self._settings)
            name = body["metadata"]["name"]
            if name != service.mounted_cache.name or name in existing:
                continue
            try:
                await self._create(MODEL_CACHE, body)
            except ApiRefused as error:
                extra = {"object": "/".join(key), "error": str(error)}
                logger.warning("the ModelCache of cache.prefetch is refused", extra=extra)
                continue
            existing.add(name)
            made = True
        return made

    async def _reconcile(
        self,
        session: aiohttp.ClientSession,
        cache: ModelCache,
        previous: report.Status | None,
        fetchers: list[Fetcher],
        volumes: list[Volume],
    ) -> bool:
        """Take the next steps for one cache and report; return whether it changes."""
        if FINALIZER not in cache.finalizers:
            if cache.deleting:
                return False
            await self._set_finalizers(cache, [*cache.finalizers, FINALIZER])
            return True
        users = self._users(cache)
        in_use = bool(users) or any(each.phase == "Bound" for each in volumes)
        if cache.claim is not None:
            in_use |= self._services.is_claim_shared(cache.name)
        targets: list[str] = []
        problem = None
        try:
            selected = await self._selected(cache)
            targets = sorted({each.name for each in selected if each.open} | _held(selected, fetchers))
            await self._sync_volumes(cache, users, volumes)
            if cache.deleting and not in_use:
                if await self._remove(cache, [each.name for each in selected if each.open], fetchers):
                    await self._set_finalizers(
                        cache, [each for each in cache.finalizers if each != FINALIZER]
                    )
                    return True
            else:
                await self._fetch(cache, targets, selected, fetchers)
        except ApiRefused as error:
            problem = (error.reason, str(error))
        facts = Facts(
            nodes=tuple(targets),
            fetchers=tuple(each for each in fetchers if not each.terminating),
            progress=await self._progress(session, fetchers),
            users=len(users),
            in_use=in_use,
            problem=problem,
        )
        status = report.report(cache, facts, previous, clock())
        await self._write(cache, previous, status)
        if status == previous and await self._expire(cache, status):
            return True
        # What waits for a person or for a pod of a user is looked at like a cache that is ready.
        lacks_volumes = cache.claim is None and len(users) != len(volumes)
        return status.conditions[0].reason in ("Fetching", "Removing") or lacks_volumes

    async def _fetch(
        self, cache: ModelCache, targets: list[str], selected: list[Node], fetchers: list[Fetcher]
    ) -> None:
        """Create the fetchers whose turn it is, and delete those of other nodes or of an older spec, one at a time."""
        names = {each.name for each in selected}
        for each in fetchers:
            if each.node not in names and not each.terminating:
                await self._delete_pod(cache, each)
        starts = fan_out.next_starts(targets, fetchers)
        if starts and cache.claim is None:
            await self._create(SECRET, fetcher.build_secret(cache, self._settings))
        for start in starts:
            peers = [each.url for each in start.peers]
            await self._create(POD, fetcher.build(cache, self._settings, node=start.node, peers=peers))
        outdated = [each for each in fetchers if each.generation != cache.generation and each.node in names]
        settled = not starts and all(
            each in outdated or each.ready or (each.reason and not each.terminating) for each in fetchers
        )
        # The API server counts a deletion of the cache as a generation, too.
        if outdated and settled and not cache.deleting and not any(each.terminating for each in outdated):
            await self._delete_pod(cache, min(outdated, key=_unready_first))

    async def _remove(self, cache: ModelCache, targets: list[str], fetchers: list[Fetcher]) -> bool:
        """Replace each fetcher by a pod that removes the model; return whether all of them are done.

        A node where no pod can run now is not waited for: it may never come back.
        """
        by_node: dict[str, list[Fetcher]] = {}
        for each in fetchers:
            by_node.setdefault(each.node, []).append(each)
            if each.task == FETCH and not each.terminating:
                await self._delete_pod(cache, each)
        for node in targets:
            if node not in by_node:
                await self._create(POD, fetcher.build_removal(cache, self._settings, node=node))
        return all(
            [each.task for each in by_node.get(node, [])] == [REMOVE] and by_node[node][0].ready
            for node in targets
        )

    async def _sync_volumes(self, cache: ModelCache, users: set[Key], volumes: list[Volume]) -> None:
        """Create the volumes that claims need, and delete those whose claim is gone; a bound one is never deleted."""
        if cache.claim is not None:
            return  # pods mount the shared claim itself
        needed = {
            (namespace, model_cache_claim.name(name, cache.name)): (namespace, name)
            for namespace, name in users
        }
        for each in volumes:
            released = each.phase in ("Released", "Failed")
            if not each.terminating and (
                released or (each.phase == "Available" and each.claim not in needed)
            ):
                await self._delete(PERSISTENT_VOLUME, None, each.name, each.uid)
        existing = {each.claim for each in volumes}
        for reserved, key in needed.items():
            if reserved not in existing:
                await self._create(PERSISTENT_VOLUME, volume.build(cache, key))

    def _users(self, cache: ModelCache) -> set[Key]:
        """Return the InferenceServices whose pods mount the cache, or did so until their last rollout is over."""
        found = set()
        for key in self._services:
            entry = self._services.get(key)
            if entry is None:
                continue
            chosen = (
                entry.service is not None
                and entry.service.mounted_cache.name == cache.name
                and not entry.deleting
            )
            if cache.claim is None:
                mounted = (CLAIM, model_cache_claim.name(key[1], cache.name)) in entry.children
            else:
                mounted = key[0] == cache.claim.namespace and entry.shares_claim_of(cache.name)
            if chosen or mounted:
                found.add(key)
        return found

    async def _claim_as_node(self, cache: ModelCache, shared: spec.Claim) -> Node:
        """Return the shared claim as a pseudo-node; create the claim if the spec has a size.

        A claim that was made is deleted with the ModelCache, so the model need not be removed from it. Another one
        cannot be mounted to remove the model unless it is bound.
        """
        name, is_made = claim.target_name(cache), shared.claim_name is None
        try:
            live = await self._client.get(CLAIM, shared.namespace, cache.claim_name)
        except ApiNotFound:
            if cache.deleting or not is_made:
                return Node(name=name, open=False)
            await self._create(CLAIM, claim.build(cache))
            return Node(name=name, open=True)
        bound = (live.get("status") or {}).get("phase") == "Bound"
        return Node(name=name, open=not cache.deleting or (bound and not is_made))

    async def _selected(self, cache: ModelCache) -> list[Node]:
        """Return the nodes with the cache's labels, from a list that is at most `NODES_SECONDS` old; or the shared claim."""
        if cache.claim is not None:
            return [await self._claim_as_node(cache, cache.claim)]
        selector = label_selector(cache.spec.node_selector)
        listed = self._nodes.get(selector)
        if listed is None or time.monotonic() - listed[0] > NODES_SECONDS:
            found = [_reduced(node) async for node in self._client.list(NODE, None, selector=selector)]
            listed = self._nodes[selector] = (time.monotonic(), found)
        return [nodes.read(node, cache.spec.tolerations) for node in listed[1]]

    async def _progress(
        self, session: aiohttp.ClientSession, fetchers: Iterable[Fetcher]
    ) -> dict[str, Progress]:
        """Return the progress of the fetchers that answer, by name; complete fetchers are not queried again."""
        limit = asyncio.Semaphore(_PARALLEL_REQUESTS)

        async def ask(each: Fetcher) -> tuple[str, Progress | None]:
            if each.ready and each.uid in self._complete:
                return each.name, self._complete[each.uid]
            async with limit:
                answer = await _ask(session, each)
            if answer is not None and answer.state == "complete":
                self._complete[each.uid] = answer
            return each.name, answer

        asked = [ask(each) for each in fetchers if each.task == FETCH and each.running and each.address]
        return {name: answer for name, answer in await asyncio.gather(*asked) if answer is not None}

    async def _write(self, cache: ModelCache, previous: report.Status | None, status: report.Status) -> None:
        """Write the status if it has changed; mere progress not too often."""
        if status == previous:
            return
        now = time.monotonic()
        only_progress = previous is not None and status.without_progress() == previous.without_progress()
        if only_progress and now - self._written_at.get(cache.uid, -PROGRESS_SECONDS) < PROGRESS_SECONDS:
            return
        body = {
            "apiVersion": MODEL_CACHE.api_version,
            "kind": MODEL_CACHE.name,
            "metadata": {"name": cache.name, "uid": cache.uid, "resourceVersion": cache.resource_version},
            "status": msgspec.to_builtins(status),
        }
        try:
            await self._client.apply(MODEL_CACHE, None, cache.name, body, subresource="status")
        except (ApiNotFound, ApiConflict):
            return  # changed or deleted since it was listed; the next pass sees it
        self._written_at[cache.uid] = now

    async def _expire(self, cache: ModelCache, status: report.Status) -> bool:
        """Delete a cache that was not used for longer than it is to be retained; return whether it was."""
        retention = cache.spec.retention_seconds
        if retention is None or cache.deleting or not status.unused_since:
            return False
        since = datetime.datetime.fromisoformat(status.unused_since)
        if (datetime.datetime.now(datetime.UTC) - since).total_seconds() < retention:
            return False
        if self._users(cache):
            return False  # one came while the status was written
        logger.info("a ModelCache is not used any more", extra={"object": cache.name})
        # This version: its owner may have changed the retention since it was listed.
        with contextlib.suppress(ApiNotFound, ApiConflict):
            await self._client.delete(
                MODEL_CACHE, None, cache.name, uid=cache.uid, version=cache.resource_version
            )
        return True

    async def _set_finalizers(self, cache: ModelCache, finalizers: list[str]) -> None:
        metadata = {"resourceVersion": cache.resource_version, "finalizers": finalizers}
        path = MODEL_CACHE.path(None, cache.name)
        await self._client.request("PATCH", path, {"metadata": metadata}, content_type=MERGE_PATCH)

    async def _create(self, kind: Kind, body: dict[str, Any]) -> None:
        """Create an object, unless it exists: its name is a hash of what it belongs to."""
        with contextlib.suppress(ApiAlreadyExists):
            await self._client.create(kind, body["metadata"].get("namespace"), body)

    async def _delete_pod(self, cache: ModelCache, pod: Fetcher) -> None:
        await self._delete(POD, fetcher.namespace(cache, self._settings), pod.name, pod.uid)

    async def _delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        """Delete exactly this object, unless it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(ApiNotFound, ApiConflict):
            await self._client.request("DELETE", kind.path(namespace, name), body)

    def _forget(self, caches: list[ModelCache], pods: set[str]) -> None:
        """Drop what is remembered of caches and pods that are gone."""
        known = {cache.uid for cache in caches}
        selectors = {label_selector(cache.spec.node_selector) for cache in caches}
        self._written_at = {uid: at for uid, at in self._written_at.items() if uid in known}
        self._complete = {uid: each for uid, each in self._complete.items() if uid in pods}
        self._nodes = {selector: each for selector, each in self._nodes.items() if selector in selectors}


async def _ask(session: aiohttp.ClientSession, each: Fetcher) -> Progress | None:
    """Return the progress that a fetcher reports; None if it does not answer, which only hides its bytes."""
    try:
        async with session.get(f"{each.url}{contract.PATH_PEER_STATUS}") as response:
            body = await read_body(response, _MAX_PROGRESS_BYTES)
        return msgspec.json.decode(body, type=Progress) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None


def _held(selected: list[Node], fetchers: list[Fetcher]) -> set[str]:
    """Return the selected nodes that have a pod, also if no new one could run there."""
    names = {each.name for each in selected}
    return {each.node for each in fetchers if each.node in names}


def _reduced(node: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a node that is read; its images alone take more than that."""
    spec_part = {name: (node.get("spec") or {}).get(name) for name in ("taints", "unschedulable")}
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = [each for each in conditions if each["type"] == "Ready"]
    return {
        "metadata": {"name": node["metadata"]["name"]},
        "spec": spec_part,
        "status": {"conditions": ready},
    }


def _unready_first(each: Fetcher) -> tuple[bool, str]:
    return each.ready, each.name
