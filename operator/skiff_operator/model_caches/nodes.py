"""The nodes that a ModelCache selects. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from skiff_operator.capacity import BLOCKING_EFFECTS, tolerates


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has the labels. `open`: a new fetcher can run there."""

    name: str
    open: bool


def read(node: dict[str, Any], tolerations: Sequence[dict[str, Any]]) -> Node:
    """Read a node. It is open if it is ready, not cordoned, and its taints are tolerated, as for a DaemonSet."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = any(
        each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or []
    )
    repelled = any(
        taint["effect"] in BLOCKING_EFFECTS and not any(tolerates(each, taint) for each in tolerations)
        for taint in spec.get("taints") or []
    )
    is_open = ready and not spec.get("unschedulable") and not repelled
    return Node(name=node["metadata"]["name"], open=is_open)
