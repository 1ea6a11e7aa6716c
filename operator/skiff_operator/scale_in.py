"""The preparation of a scale-in: writes the cost of deleting each pod, just before the Deployment gets fewer replicas.

The load of a pod is read from its own page of metrics. That is best effort. A pod that does not answer keeps no cost,
which counts as 0, the cost of an idle pod. Nothing is read or written at any other time.
"""

import asyncio
from typing import Any, Final

from skiff_operator import deletion_cost
from skiff_operator.client import MERGE_PATCH, Client
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import POD
from skiff_operator.log import logger
from skiff_operator.pod_metrics import read_metrics
from skiff_operator.resources.metadata import label_selector, selector
from skiff_operator.spec import InferenceService

MAX_PODS: Final = 256
"""A service with more pods is scaled in without costs."""
_SETTLE_SECONDS: Final = 1.0
"""The controller that deletes pods learns costs by a watch of its own, which may be behind that of the Deployment."""


class ScaleIn:
    """Writes the costs of deleting the pods of a service."""

    def __init__(self, client: Client) -> None:
        """List and annotate pods through `client`."""
        self._client = client

    async def prepare(self, service: InferenceService) -> None:
        """Write the cost of each ready pod whose load is known; an error is logged and delays nothing."""
        label = label_selector(selector(service))
        where = {"object": f"{service.namespace}/{service.name}"}
        try:
            pods = [pod async for pod in self._client.list(POD, service.namespace, selector=label)]
            ready = [pod for pod in pods if _is_ready(pod)]
            if len(ready) > MAX_PODS:
                logger.info("scaled in without deletion costs", extra={**where, "pods": len(ready)})
                return
            costs = await read_metrics([pod["status"]["podIP"] for pod in ready], _read_cost)
            changed = [(pod, cost) for pod, cost in zip(ready, costs, strict=True) if _cost(pod) != cost]
            for pod, cost in changed:
                await self._annotate(pod, cost)
            if changed:
                await asyncio.sleep(_SETTLE_SECONDS)
        except OperatorError as error:
            logger.warning("deletion costs not written", extra={**where, "error": str(error)})

    async def _annotate(self, pod: dict[str, Any], cost: str | None) -> None:
        """Write one pod's cost, or remove that of an earlier scale-in."""
        meta = pod["metadata"]
        body = {"metadata": {"uid": meta["uid"], "annotations": {deletion_cost.ANNOTATION: cost}}}
        path = POD.path(meta["namespace"], meta["name"])
        await self._client.request("PATCH", path, body, content_type=MERGE_PATCH)


def _is_ready(pod: dict[str, Any]) -> bool:
    status = pod.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    deleting = "deletionTimestamp" in pod["metadata"]
    return conditions.get("Ready") == "True" and bool(status.get("podIP")) and not deleting


def _cost(pod: dict[str, Any]) -> str | None:
    cost: str | None = (pod["metadata"].get("annotations") or {}).get(deletion_cost.ANNOTATION)
    return cost


def _read_cost(page: str) -> str | None:
    cost = deletion_cost.from_metrics(page)
    return None if cost is None else str(cost)
