"""The nodes that a ModelCache selects. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from skiff_operator.capacity import admits, read_node


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the cache selects. `open`: it is schedulable for a new fetcher."""

    name: str
    open: bool


def read(node: dict[str, Any], tolerations: Sequence[dict[str, Any]]) -> Node:
    """Read a node. It is open if it is ready, not cordoned, and its taints are tolerated, as for a DaemonSet."""
    return Node(name=node["metadata"]["name"], open=admits(read_node(node), {"tolerations": tolerations}))
