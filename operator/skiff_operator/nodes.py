"""Node capacity: detects pods that no node of the cluster could ever hold.

The scheduler reports that too few GPUs are free, but not that no node has that many. Nodes are listed only while
pods of some InferenceService are unscheduled, at most once in two resyncs; without the right to list them nothing
is reported. They are not watched: a watch would deliver the heartbeats of every node.
"""

import asyncio
import time
from typing import Any, Final, NamedTuple

from skiff_operator.client import Client
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import NODE
from skiff_operator.log import logger
from skiff_operator.resources import containers, overlay
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

_RESYNCS: Final = 2


class Node(NamedTuple):
    """One schedulable node: its labels, and the devices that its pods may allocate, by extended resource."""

    labels: dict[str, str]
    devices: dict[str, int]


class Nodes:
    """The schedulable nodes with devices, from the last list."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """List through `client` on first use."""
        self._client = client
        self._settings = settings
        self._nodes: tuple[Node, ...] | None = None
        self._listed_at: float | None = None
        self._listing = asyncio.Lock()

    async def shortage(self, service: InferenceService) -> str:
        """Return a message when no node has the GPUs of a pod; empty when one has, or when nodes are unknown."""
        needed, resource = containers.gpus(service), containers.gpu_resource(service, self._settings)
        await self._refresh()
        if self._nodes is None:
            return ""
        selector = _node_selector(service)
        counts = [node.devices.get(resource, 0) for node in self._nodes if _matches(node, selector)]
        largest = max(counts, default=0)
        if largest >= needed:
            return ""
        allowed = " that nodeSelector allows" if selector else ""
        return f"no schedulable node{allowed} has {needed} {resource}; the largest has {largest}"

    async def _refresh(self) -> None:
        """List the nodes unless the last list is recent; concurrent callers share one list."""
        async with self._listing:
            now = time.monotonic()
            if (
                self._listed_at is not None
                and now - self._listed_at < _RESYNCS * self._settings.resync_seconds
            ):
                return
            try:
                found = [_read(node) async for node in self._client.list(NODE, None, selector="")]
            except OperatorError as error:
                if self._listed_at is None or self._nodes is not None:
                    logger.info("nodes not listed", extra={"error": str(error)})
                self._nodes = None
            else:
                self._nodes = tuple(node for node in found if node is not None)
            self._listed_at = time.monotonic()


def _read(node: dict[str, Any]) -> Node | None:
    """Reduce a node to its record; None for one that is cordoned or has no devices."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    devices = {
        name: int(amount) for name, amount in allocatable.items() if "/" in name and amount.isdecimal()
    }
    if not devices or (node.get("spec") or {}).get("unschedulable"):
        return None
    return Node(node["metadata"].get("labels") or {}, devices)


def _node_selector(service: InferenceService) -> dict[str, str]:
    """Merge the node selectors of the spec and of its `podTemplate`."""
    patch = (service.spec.pod_template.get("spec") or {}).get("nodeSelector", {})
    selector = overlay.merge({"nodeSelector": service.spec.node_selector}, {"nodeSelector": patch})
    labels = selector.get("nodeSelector")
    return labels if isinstance(labels, dict) else {}


def _matches(node: Node, selector: dict[str, str]) -> bool:
    return all(node.labels.get(name) == value for name, value in selector.items())
