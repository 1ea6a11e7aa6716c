"""GPUs of the cluster's nodes, and the part of them that no pod has requested. `gather` reads, `count` is pure.

Both lists cover the whole cluster, so they need rights that a user of one namespace may not have: then the answer is
None, and the commands say so instead of guessing.
"""

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, NamedTuple

from skiff_operator.client import Client
from skiff_operator.errors import ApiRefused
from skiff_operator.kinds import NODE, POD, Kind

_PAGE: Final = 500
_MAX_OBJECTS: Final = 50_000
_GPU_MEMORY: Final = "nvidia.com/gpu.memory"
_GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Labels of NVIDIA's GPU feature discovery: MiB of one GPU, and its name."""


class NodeGpus(NamedTuple):
    """The GPUs of one node. `free` is None when the pods of the cluster are not known.

    `usable`: pods may be placed there by its cordon and by the node selector. `memory_bytes` of one GPU is 0 and `product`
    empty without the labels of the GPU feature discovery.
    """

    name: str
    usable: bool
    total: int
    free: int | None
    memory_bytes: int = 0
    product: str = ""


async def gather(client: Client, resource: str, selector: dict[str, str]) -> tuple[NodeGpus, ...] | None:
    """Return the nodes that have units of the extended resource, by name; None if the user may not list nodes."""
    try:
        nodes = [node async for node in _list(client, NODE, "")]
    except ApiRefused:
        return None
    pods: list[dict[str, Any]] | None
    try:
        running = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
        pods = [pod async for pod in _list(client, POD, running)]
    except ApiRefused:
        pods = None
    return count(nodes, pods, resource, selector)


def count(
    nodes: Iterable[dict[str, Any]],
    pods: Iterable[dict[str, Any]] | None,
    resource: str,
    selector: dict[str, str],
) -> tuple[NodeGpus, ...]:
    """Subtract what pods request from what nodes offer, for each node that offers any."""
    used: dict[str, int] = {}
    for pod in pods or ():
        node = (pod.get("spec") or {}).get("nodeName", "")
        used[node] = used.get(node, 0) + requested(pod["spec"], resource)
    found = []
    for node in nodes:
        meta, name = node["metadata"], node["metadata"]["name"]
        total = _whole(((node.get("status") or {}).get("allocatable") or {}).get(resource))
        if not total:
            continue
        labels = meta.get("labels") or {}
        matches = all(labels.get(key) == value for key, value in selector.items())
        cordoned = bool((node.get("spec") or {}).get("unschedulable"))
        found.append(
            NodeGpus(
                name=name,
                usable=matches and not cordoned,
                total=total,
                free=None if pods is None else max(0, total - used.get(name, 0)),
                memory_bytes=_whole(labels.get(_GPU_MEMORY)) << 20,
                product=labels.get(_GPU_PRODUCT, ""),
            )
        )
    return tuple(sorted(found))


def requested(pod_spec: dict[str, Any], resource: str) -> int:
    """Return the units that a pod requests: the sum of its containers, or the largest init container if that is more."""
    sums = {
        group: [
            _whole(((each.get("resources") or {}).get("limits") or {}).get(resource))
            for each in pod_spec.get(group) or []
        ]
        for group in ("containers", "initContainers")
    }
    return max(sum(sums["containers"]), max(sums["initContainers"], default=0))


def _whole(quantity: Any) -> int:
    """Return a quantity of an extended resource, which is a whole number; 0 for anything else."""
    text = str(quantity)
    return int(text) if text.isdecimal() else 0


async def _list(client: Client, kind: Kind, fields: str) -> AsyncIterator[dict[str, Any]]:
    """List a kind in the whole cluster, up to a bound."""
    query = {"limit": str(_PAGE)} | ({"fieldSelector": fields} if fields else {})
    for _ in range(_MAX_OBJECTS // _PAGE):
        page = await client.request("GET", kind.path(), query=query)
        for item in page["items"]:
            yield item
        token = page["metadata"].get("continue")
        if not token:
            return
        query["continue"] = token
