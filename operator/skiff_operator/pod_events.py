"""Events about a pod that its status does not show: volumes that cannot be attached, nodes that are being added.

They are read only while a pod is stuck, and not watched: a cluster has more Events than anything else.
"""

import time
from typing import Any, Final

from skiff_operator.client import Client
from skiff_operator.errors import OperatorError
from skiff_operator.log import logger
from skiff_operator.settings import Settings
from skiff_operator.status import Problem

LOOKS_PER_RESYNC: Final = 3
_LIMIT: Final = "100"
_MAX_REMEMBERED: Final = 1024
_OBSTACLES: Final = {
    "FailedAttachVolume": "VolumeNotMounted",
    "FailedMount": "VolumeNotMounted",
    "FailedMapVolume": "VolumeNotMounted",
    "FailedCreatePodSandBox": "SandboxNotCreated",
}
"""Reasons of the kubelet's and the attach controller's Events, and ours."""
_SCALE_UP_REASONS: Final = ("TriggeredScaleUp", "Nominated")
"""Events of the cluster-autoscaler and of Karpenter about a pod for which they add a node."""


class PodEvents:
    """Reads the Events about single pods."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read through `client` on first use."""
        self._client = client
        self._fresh_seconds = settings.resync_seconds / LOOKS_PER_RESYNC
        self._obstacles: dict[str, tuple[float, Problem | None]] = {}
        """The last look at each pod: when, and what it showed."""

    async def obstacle(self, namespace: str, name: str, uid: str) -> Problem | None:
        """Return the obstacle to the creation of a pod's containers, unless a newer Event shows that it is overcome.

        The Events of a pod are read at most three times between two resyncs.
        """
        now = time.monotonic()
        known = self._obstacles.get(uid)
        if known is not None and now - known[0] < self._fresh_seconds:
            return known[1]
        if len(self._obstacles) >= _MAX_REMEMBERED:
            self._obstacles.clear()
        events, problem = await self._list(namespace, uid), None
        newest = max(events, key=lambda each: (_time(each), each.get("reason") in _OBSTACLES), default={})
        if newest.get("reason") in _OBSTACLES:
            problem = Problem(_OBSTACLES[newest["reason"]], f"pod {name}: {newest.get('message', '')}")
        self._obstacles[uid] = now, problem
        return problem

    async def scale_up_announced(self, namespace: str, uid: str, *, since: str) -> bool:
        """Return whether a node autoscaler has announced a node for a pod at or after `since` (RFC 3339)."""
        events = await self._list(namespace, uid)
        return any(event.get("reason") in _SCALE_UP_REASONS and _time(event) >= since for event in events)

    async def _list(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": _LIMIT}
        try:
            page = await self._client.request("GET", f"/api/v1/namespaces/{namespace}/events", query=query)
        except OperatorError as error:
            logger.info("events not listed", extra={"error": str(error)})
            return []
        items: list[dict[str, Any]] = page["items"]
        return items


def _time(event: dict[str, Any]) -> str:
    """Return the time of the newest occurrence of an Event, to the second."""
    series = event.get("series") or {}
    candidates = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    stamp: str = next((each for each in candidates if each), "")
    return stamp[:19] + "Z" if stamp else ""
