"""Room for one more pod: resource requests against the free resources of nodes. Pure.

An estimate before a rollout, not a scheduler: it knows resource requests, node selectors, required node affinity, taints
and cordons. Affinity between pods, topology spread, priorities and the nodes of volumes are left to the scheduler,
whose verdict on the new pod corrects the estimate.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

from skiff_operator.drift import amount

Amounts = dict[str, Decimal]
"""Amounts by resource name: cores, bytes, or devices."""

PODS: Final = "pods"
_BYTES: Final = ("memory", "ephemeral-storage")
_UNITS: Final = (("Gi", Decimal(1024**3)), ("Mi", Decimal(1024**2)), ("Ki", Decimal(1024)))
_DEFAULT_TOLERATIONS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_BLOCKING_EFFECTS: Final = ("NoSchedule", "NoExecute")


class Node(NamedTuple):
    """A node as the scheduler sees it. `taints`: only those that keep pods away; `schedulable`: it is ready and not cordoned."""

    name: str
    labels: dict[str, str]
    taints: tuple[dict[str, Any], ...]
    allocatable: Amounts
    schedulable: bool = True


class PlacedPod(NamedTuple):
    """The part of a node's resources that one pod holds. `old`: a pod that the rollout will delete."""

    requests: Amounts
    old: bool


class Room(NamedTuple):
    """The room that a rollout has. `shortage` says what is missing for a pod beside the old ones.

    `fits_surge`: a new pod fits while all old ones run; `fits_replace`: it fits once one old pod is gone.
    """

    fits_surge: bool
    fits_replace: bool
    shortage: str = ""


def read_node(node: dict[str, Any]) -> Node:
    """Reduce a node to its record."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    schedulable = not spec.get("unschedulable") and conditions.get("Ready", "True") == "True"
    taints = tuple(taint for taint in spec.get("taints") or [] if taint.get("effect") in _BLOCKING_EFFECTS)
    meta = node["metadata"]
    allocatable = _amounts(status.get("allocatable") or {})
    return Node(meta["name"], meta.get("labels") or {}, taints, allocatable, schedulable)


def requests(pod_spec: dict[str, Any]) -> Amounts:
    """Return the resources that the scheduler reserves for a pod, itself counted under `pods`.

    The containers run together with the sidecars, which are init containers that are restarted always. Each other init
    container runs alone with the sidecars before it. A pod needs the larger of the two for each resource.
    """
    sidecars: Amounts = {}
    initial: Amounts = {}
    for container in pod_spec.get("initContainers") or []:
        own = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = _sum(sidecars, own)
            own = {}
        initial = _larger(initial, _sum(sidecars, own))
    together = sidecars
    for container in pod_spec.get("containers") or []:
        together = _sum(together, _container_requests(container))
    needed = _larger(initial, together) | _container_requests(pod_spec)
    return _sum(_sum(needed, _amounts(pod_spec.get("overhead") or {})), {PODS: Decimal(1)})


def admits(node: Node, pod_spec: dict[str, Any]) -> bool:
    """Return whether a node's state, labels and taints admit a pod."""
    selector = pod_spec.get("nodeSelector") or {}
    tolerations = pod_spec.get("tolerations") or []
    return (
        node.schedulable
        and all(node.labels.get(name) == value for name, value in selector.items())
        and _meets_affinity(node, pod_spec)
        and all(any(tolerates(each, taint) for each in tolerations) for taint in node.taints)
    )


def find_room(needed: Amounts, nodes: Iterable[tuple[Node, Sequence[PlacedPod]]]) -> Room:
    """Return the room for a pod on nodes that admit it, each with its pods."""
    closest: list[str] | None = None
    fits_replace = False
    for node, pods in nodes:
        free = free_amounts(node, pods)
        missing = _missing(needed, free)
        if not missing:
            return Room(fits_surge=True, fits_replace=True)
        if closest is None or len(missing) < len(closest):
            closest = missing
        fits_replace |= any(not _missing(needed, _sum(free, pod.requests)) for pod in pods if pod.old)
    return Room(
        fits_surge=False, fits_replace=fits_replace, shortage=", ".join(closest or ["no node admits the pod"])
    )


def count_pods(needed: Amounts, free: Amounts) -> int:
    """Return the number of pods that fit into free resources."""
    return int(
        min(max(free.get(name, Decimal(0)), Decimal(0)) // value for name, value in needed.items() if value)
    )


def fits_in_place(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Return whether a pod of the spec `new` fits wherever one of the spec `old` did."""
    same = ("nodeSelector", "affinity", "topologySpreadConstraints", "runtimeClassName")
    if any((new.get(name) or None) != (old.get(name) or None) for name in same):
        return False
    if _own_tolerations(new) != _own_tolerations(old):
        return False
    held = requests(old)
    return all(value <= held.get(name, Decimal(0)) for name, value in requests(new).items())


def _own_tolerations(pod_spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tolerations without those that the API server adds to every pod."""
    return [each for each in pod_spec.get("tolerations") or [] if each.get("key") not in _DEFAULT_TOLERATIONS]


def free_amounts(node: Node, pods: Iterable[PlacedPod]) -> Amounts:
    """Return what pods leave of a node's resources; below 0 where they request more than it has."""
    free = dict(node.allocatable)
    for pod in pods:
        for name, value in pod.requests.items():
            free[name] = free.get(name, Decimal(0)) - value
    return free


def _missing(needed: Amounts, free: Amounts) -> list[str]:
    """Describe each resource that is short: the amount that the pod needs, and the amount that is free."""
    return [
        f"needs {quantity(name, value)} {name}, {quantity(name, max(free.get(name, Decimal(0)), Decimal(0)))} free"
        for name, value in devices_first(needed)
        if value > max(free.get(name, Decimal(0)), Decimal(0))
    ]


def devices_first(amounts: Amounts) -> list[tuple[str, Decimal]]:
    """Return the amounts by name, those of devices before all others."""
    return sorted(amounts.items(), key=lambda item: ("/" not in item[0], item[0]))


def quantity(name: str, value: Decimal) -> str:
    """Format an amount as a Kubernetes quantity."""
    if name in _BYTES:
        for suffix, size in _UNITS:
            if value >= size:
                return f"{(value / size).quantize(Decimal('0.1')).normalize():f}{suffix}"
    return f"{value.normalize():f}"


def _container_requests(container: dict[str, Any]) -> Amounts:
    """Return the requests of a container; a limit without a request is also the request."""
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(quantities: dict[str, Any]) -> Amounts:
    parsed = {name: amount(value) for name, value in quantities.items()}
    return {name: value for name, value in parsed.items() if isinstance(value, Decimal)}


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return one | {name: one.get(name, Decimal(0)) + value for name, value in other.items()}


def _larger(one: Amounts, other: Amounts) -> Amounts:
    return one | {name: max(one.get(name, Decimal(0)), value) for name, value in other.items()}


def tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    """Return whether a toleration lets its pods run on a node with this taint."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator", "Equal") == "Exists":
        return key in ("", taint.get("key"))
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return bool(key == taint.get("key") and same_value)


def _meets_affinity(node: Node, pod_spec: dict[str, Any]) -> bool:
    """Return whether one term of the required node affinity matches; all expressions of a term must hold."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(_meets_term(node, term) for term in required.get("nodeSelectorTerms") or [])


def _meets_term(node: Node, term: dict[str, Any]) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return False
    names = {"metadata.name": node.name}
    return all(_holds(node.labels, each) for each in expressions) and all(_holds(names, e) for e in fields)


def _holds(labels: dict[str, str], expression: dict[str, Any]) -> bool:
    """Evaluate one expression of a node selector; an operator that is unknown here is left to the scheduler."""
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not value.lstrip("-").isdecimal() or len(values) != 1:
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        case _:
            return True
