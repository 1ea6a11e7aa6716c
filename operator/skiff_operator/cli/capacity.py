"""Free resources of the cluster's nodes for pods of one spec, by the operator's own estimate.

Nodes and pods of the whole cluster need rights that a user of one namespace may not have: then the answer is None, and
the commands say so instead of guessing.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from skiff_operator import capacity
from skiff_operator.capacity import Amounts, Node, PlacedPod
from skiff_operator.client import Client
from skiff_operator.errors import ApiRefused
from skiff_operator.kinds import NODE, POD

_RUNNING: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_SHARED: Final = ".shared"
"""The end of the name of a GPU that NVIDIA's device plugin shares; the labels have the name without it."""


class NodeRoom(NamedTuple):
    """One node. `admits`: it takes the pod, if it has room; `free`: what no pod has requested, None if that is not known."""

    node: Node
    admits: bool
    free: Amounts | None

    def pods(self, needed: Amounts) -> int:
        """Return the number of pods with these requests that find room here now."""
        return capacity.count_pods(needed, self.free) if self.admits and self.free is not None else 0

    def total(self, resource: str) -> int:
        """Return the number of devices of a kind."""
        return int(self.node.allocatable.get(resource, 0))

    def free_devices(self, resource: str) -> int | None:
        """Return the number of devices of a kind that no pod has requested."""
        return None if self.free is None else max(0, int(self.free.get(resource, 0)))

    def gpu_memory_bytes(self, resource: str) -> int:
        """Return the memory of one GPU as NVIDIA's GPU feature discovery reports it, by its label in MiB; 0 without it."""
        text = self.node.labels.get(f"{resource.removesuffix(_SHARED)}.memory", "")
        return int(text) << 20 if text.isdecimal() else 0

    def gpu_product(self, resource: str) -> str:
        """Return the name of the GPUs' model, by the label of the same origin; empty without it."""
        return self.node.labels.get(f"{resource.removesuffix(_SHARED)}.product", "")


async def gather(client: Client, pod_spec: dict[str, Any]) -> tuple[NodeRoom, ...] | None:
    """Return the room of all nodes for pods of a spec, by name; None if the user may not list nodes."""
    try:
        nodes = [capacity.read_node(node) async for node in client.list(NODE, None, selector="")]
    except ApiRefused:
        return None
    placed: dict[str, list[PlacedPod]] = {}
    try:
        async for pod in client.list(POD, None, selector="", fields=_RUNNING):
            held = PlacedPod(capacity.requests(pod["spec"]), old=False)
            placed.setdefault(pod["spec"]["nodeName"], []).append(held)
    except ApiRefused:
        return measure(nodes, None, pod_spec)
    return measure(nodes, placed, pod_spec)


def measure(
    nodes: Iterable[Node], placed: Mapping[str, list[PlacedPod]] | None, pod_spec: dict[str, Any]
) -> tuple[NodeRoom, ...]:
    """Subtract what the pods of each node request from what it offers."""
    found = [
        NodeRoom(
            node,
            capacity.admits(node, pod_spec),
            None if placed is None else capacity.free_amounts(node, placed.get(node.name, ())),
        )
        for node in nodes
    ]
    return tuple(sorted(found, key=lambda room: room.node.name))
