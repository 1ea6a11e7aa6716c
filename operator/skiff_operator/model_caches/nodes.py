"""The nodes that a ModelCache selects. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has the labels. `open`: a new fetcher can run there."""

    name: str
    open: bool


def label_selector(node_selector: dict[str, str]) -> str:
    """Return the selector of a list request."""
    return ",".join(f"{key}={value}" for key, value in sorted(node_selector.items()))


def read(node: dict[str, Any], tolerations: Sequence[dict[str, Any]]) -> Node:
    """Read a node. It is open if it is ready, not cordoned, and its taints are tolerated, as for a DaemonSet."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = any(
        each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or []
    )
    repelled = any(
        taint["effect"] in ("NoSchedule", "NoExecute")
        and not any(_tolerates(each, taint) for each in tolerations)
        for taint in spec.get("taints") or []
    )
    is_open = ready and not spec.get("unschedulable") and not repelled
    return Node(name=node["metadata"]["name"], open=is_open)


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key, operator = toleration.get("key", ""), toleration.get("operator", "Equal")
    if not key:
        return bool(operator == "Exists")
    same_value = operator == "Exists" or toleration.get("value", "") == taint.get("value", "")
    return bool(key == taint["key"] and same_value)
