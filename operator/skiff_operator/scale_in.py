"""The preparation of a scale-in: writes the cost of deleting each pod, just before the Deployment gets fewer replicas.

The load of a pod is read from its own page of metrics, past the API server: a proxy through it would need a right to
everything that any pod serves. That is best effort. A pod that does not answer keeps no cost, which counts as 0, the
cost of an idle pod. Nothing is read or written at any other time.
"""

import asyncio
from typing import Any, Final

import aiohttp

from skiff_operator import deletion_cost
from skiff_operator.client import MERGE_PATCH, Client
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import POD
from skiff_operator.log import logger
from skiff_operator.resources.metadata import label_selector, selector
from skiff_operator.response_body import read_body
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

MAX_PODS: Final = 256
"""A service with more pods is scaled in without costs."""
_CONNECTIONS: Final = 16
_PAGE_SECONDS: Final = 1.0
_ALL_SECONDS: Final = 5.0
_MAX_PAGE_BYTES: Final = 1 << 20
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
            costs = await _read_costs([pod["status"]["podIP"] for pod in ready])
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


async def _read_costs(addresses: list[str]) -> list[str | None]:
    """Read the costs of pods, all at the same time; None for a pod that does not answer in time."""
    costs: list[str | None] = [None] * len(addresses)

    async def read(session: aiohttp.ClientSession, index: int) -> None:
        address = addresses[index]
        host = f"[{address}]" if ":" in address else address
        try:
            async with session.get(f"http://{host}:{contract.API_PORT}{contract.PATH_METRICS}") as response:
                page = await read_body(response, _MAX_PAGE_BYTES) if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        cost = deletion_cost.from_metrics(page.decode(errors="replace"))
        costs[index] = None if cost is None else str(cost)

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PAGE_SECONDS, sock_read=_PAGE_SECONDS)
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        tasks = [asyncio.create_task(read(session, index)) for index in range(len(addresses))]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_ALL_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return costs
