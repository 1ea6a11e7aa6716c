"""Room for a rollout: reads nodes and pods when one begins, for the estimates of `capacity`.

Nothing is watched. The nodes are listed at most three times between two resyncs, and so are the pods of each node, which
the API server finds by an index. Without the right to list nodes, as with Roles of `watchNamespaces`, the room is unknown; a
rollout then begins with a pod beside the old ones, and the scheduler's verdict on that pod decides.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Final

from skiff_operator import capacity
from skiff_operator.capacity import Node, PlacedPod, Room
from skiff_operator.client import Client
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import NODE, POD
from skiff_operator.log import logger
from skiff_operator.resources import volumes
from skiff_operator.resources.metadata import LABEL_REVISION, label_selector, selector
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

LISTS_PER_RESYNC: Final = 3
MAX_NODES: Final = 64
"""Nodes whose pods are listed for one rollout. When none of them has room and there are more, the room is unknown."""
_NOT_ENDED: Final = "status.phase!=Succeeded,status.phase!=Failed"


class RoomFinder:
    """Finds room for pods of a new revision; concurrent callers share what was read."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read through `client` on first use."""
        self._client = client
        self.fresh_seconds = settings.resync_seconds / LISTS_PER_RESYNC
        self._lock = asyncio.Lock()
        self._nodes: tuple[Node, ...] | None = None
        self._pods: dict[str, list[dict[str, Any]]] = {}
        self._read_at = -self.fresh_seconds

    async def find(self, service: InferenceService, revision: str, pod_spec: dict[str, Any]) -> Room | None:
        """Return the room for a pod of `revision` beside and instead of older ones; None when it is unknown."""
        async with self._lock:
            try:
                return await self._find(service, revision, pod_spec)
            except OperatorError as error:
                logger.info("room for a rollout is unknown", extra={"error": str(error)})
                return None

    async def fits_in_place(self, service: InferenceService, revision: str, pod_spec: dict[str, Any]) -> bool:
        """Return whether a pod of `revision` fits wherever each older pod of the service runs; False when it is unknown."""
        try:
            pods = await self._own_pods(service)
        except OperatorError as error:
            logger.info("pods not listed", extra={"error": str(error)})
            return False
        of_new = [pod for pod in pods if _revision(pod) == revision]
        older = [pod["spec"] for pod in pods if pod not in of_new and "nodeName" in pod["spec"]]
        # As admitted: webhooks and the API server's defaults apply to the pods of both revisions.
        wanted = of_new[0]["spec"] if of_new else pod_spec
        return bool(older) and all(capacity.fits_in_place(wanted, old) for old in older)

    async def _find(self, service: InferenceService, revision: str, pod_spec: dict[str, Any]) -> Room | None:
        now = time.monotonic()
        if now - self._read_at >= self.fresh_seconds:
            self._pods.clear()
            self._nodes, self._read_at = None, now
            nodes = self._client.list(NODE, None, selector="")
            self._nodes = tuple([capacity.read_node(node) async for node in nodes])
        if self._nodes is None:
            return None
        needed = capacity.requests(pod_spec)
        candidates = [
            node
            for node in self._nodes
            if capacity.admits(node, pod_spec)
            and all(node.allocatable.get(name, 0) >= value for name, value in needed.items())
        ]
        if volumes.needs_claim(service):
            held = {pod["spec"].get("nodeName") for pod in await self._own_pods(service)}
            candidates = [node for node in candidates if node.name in held]
        for node in candidates[:MAX_NODES]:
            if node.name not in self._pods:
                self._pods[node.name] = await self._pods_of(node)
            if capacity.find_room(needed, self._placed(service, revision, [node])).fits_surge:
                break
        room = capacity.find_room(needed, self._placed(service, revision, candidates[:MAX_NODES]))
        return None if not room.fits_surge and len(candidates) > MAX_NODES else room

    def _placed(
        self, service: InferenceService, revision: str, nodes: list[Node]
    ) -> Iterator[tuple[Node, list[PlacedPod]]]:
        """Yield the nodes whose pods were listed, each with its pods."""
        labels = selector(service).items()
        for node in nodes:
            if node.name not in self._pods:
                continue
            pods = []
            for pod in self._pods[node.name]:
                meta = pod["metadata"]
                ours = meta["namespace"] == service.namespace and labels <= (meta.get("labels") or {}).items()
                old = ours and _revision(pod) != revision and "deletionTimestamp" not in meta
                pods.append(PlacedPod(capacity.requests(pod["spec"]), old))
            yield node, pods

    async def _pods_of(self, node: Node) -> list[dict[str, Any]]:
        fields = f"spec.nodeName={node.name},{_NOT_ENDED}"
        return [_reduced(pod) async for pod in self._client.list(POD, None, selector="", fields=fields)]

    async def _own_pods(self, service: InferenceService) -> list[dict[str, Any]]:
        """List the service's pods that are neither ended nor being deleted."""
        label = label_selector(selector(service))
        pods = self._client.list(POD, service.namespace, selector=label, fields=_NOT_ENDED)
        return [pod async for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def _revision(pod: dict[str, Any]) -> str:
    revision: str = (pod["metadata"].get("labels") or {}).get(LABEL_REVISION, "")
    return revision


def _reduced(pod: dict[str, Any]) -> dict[str, Any]:
    """Keep the part of a pod that counts here: some thousand are held for a few seconds."""
    meta, spec = pod["metadata"], pod["spec"]
    kept = ("name", "namespace", "labels", "deletionTimestamp")
    parts = ("initContainers", "containers")
    reduced: dict[str, Any] = {
        part: [
            {name: each[name] for name in ("resources", "restartPolicy") if name in each}
            for each in spec.get(part) or []
        ]
        for part in parts
    }
    reduced |= {name: spec[name] for name in ("resources", "overhead") if name in spec}
    return {"metadata": {name: meta[name] for name in kept if name in meta}, "spec": reduced}
