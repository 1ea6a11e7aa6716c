"""The status of a ModelCache, computed from observed facts. Pure: the time is an argument."""

from typing import Final, Literal

import msgspec

from skiff_operator.model_caches.fetcher import FETCH, REMOVE, Fetcher
from skiff_operator.model_caches.spec import ModelCache
from skiff_operator.status import Condition, dated

READY: Final = "Ready"
MAX_INCOMPLETE: Final = 100


class Progress(msgspec.Struct, frozen=True):
    """The answer of a fetcher about its download; of `contract.PATH_PEER_STATUS`."""

    state: str
    received_bytes: int
    total_bytes: int
    commit: str = ""


class IncompleteNode(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A node, or a shared claim as NAMESPACE/NAME, that does not have the model yet, or not removed it yet."""

    node: str
    state: Literal["Waiting", "Starting", "Fetching", "Failed", "Removing"]
    received_bytes: int = 0
    total_bytes: int = 0
    percent: int = 0
    reason: str = ""
    message: str = ""


class Status(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `status` of a ModelCache."""

    observed_generation: int
    nodes: int
    ready_nodes: int
    users: int
    conditions: tuple[Condition, ...]
    unused_since: str = ""
    commit: str = ""
    size_bytes: int = 0
    incomplete: tuple[IncompleteNode, ...] = ()

    def without_progress(self) -> "Status":
        """Return the status without what changes all the time while a model is fetched."""
        still = [IncompleteNode(each.node, each.state, reason=each.reason) for each in self.incomplete]
        return msgspec.structs.replace(self, incomplete=tuple(still))


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a status. `nodes`: names of the nodes that should have the model.

    `problem`: reason and message of what the API server refused. `in_use`: a volume of the cache is bound.
    """

    nodes: tuple[str, ...]
    fetchers: tuple[Fetcher, ...]
    progress: dict[str, Progress]
    users: int
    in_use: bool
    problem: tuple[str, str] | None = None


def report(cache: ModelCache, facts: Facts, previous: Status | None, now: str) -> Status:
    """Compute the status at `now` (RFC 3339)."""
    by_node = {each.node: each for each in facts.fetchers}
    waiting = Fetcher(name="", uid="", node="", task=FETCH, generation=0)
    states = [_incomplete(node, by_node.get(node, waiting), facts.progress) for node in facts.nodes]
    incomplete = [each for each in states if each is not None]
    complete = [
        facts.progress[each.name]
        for each in facts.fetchers
        if each.name in facts.progress and facts.progress[each.name].state == "complete"
    ]
    ready = len(facts.nodes) - len(incomplete)
    before = None if previous is None else next(iter(previous.conditions), None)
    verdict = (READY, *_verdict(cache, facts, ready, incomplete))
    condition = dated(verdict, cache.generation, before, now)
    unused_since = previous.unused_since if previous else ""
    return Status(
        observed_generation=cache.generation,
        nodes=len(facts.nodes),
        ready_nodes=0 if cache.deleting else ready,
        users=facts.users,
        conditions=(condition,),
        unused_since="" if facts.in_use else unused_since or now,
        commit=complete[0].commit if complete else previous.commit if previous else "",
        size_bytes=complete[0].total_bytes if complete else previous.size_bytes if previous else 0,
        incomplete=tuple(incomplete[:MAX_INCOMPLETE]),
    )


def read(stored: object) -> Status | None:
    """Parse the status of an object; None when it has none, or one of another schema."""
    try:
        return msgspec.convert(stored, Status)
    except msgspec.ValidationError:
        return None


def _verdict(
    cache: ModelCache, facts: Facts, ready: int, incomplete: list[IncompleteNode]
) -> tuple[bool, str, str]:
    count = f"{ready} of {len(facts.nodes)} {'nodes have' if cache.claim is None else 'claims has'} the model"
    if facts.problem is not None:
        return False, *facts.problem
    if cache.deleting and facts.in_use:
        return (
            False,
            "InUse",
            f"{facts.users} InferenceServices use the model; it is removed when their pods are gone",
        )
    if cache.deleting:
        what = "nodes still have" if cache.claim is None else "claims still has"
        return False, "Removing", f"{len(incomplete)} {what} the model"
    if not facts.nodes and cache.claim is not None:
        missing = f"namespace {cache.claim.namespace} has no claim {cache.claim_name}"
        return False, "NoClaim", f"{missing}; create it, or another ModelCache with storage.claim.size"
    if not facts.nodes:
        return False, "NoNodes", "no node is ready that spec.nodeSelector and spec.tolerations allow"
    failed = next((each for each in incomplete if each.state == "Failed"), None)
    if failed is not None:
        place = "node" if cache.claim is None else "claim"
        return False, failed.reason, f"{count}; {place} {failed.node}: {failed.message}"
    if incomplete:
        return False, "Fetching", count
    return True, "Ready", count


def _incomplete(node: str, fetcher: Fetcher, progress: dict[str, Progress]) -> IncompleteNode | None:
    """Return the state of a node; None if its task is done."""
    if fetcher.task == REMOVE:
        return (
            None
            if fetcher.ready
            else IncompleteNode(node, "Removing", reason=fetcher.reason, message=fetcher.message)
        )
    if fetcher.ready:
        return None
    if not fetcher.name:
        return IncompleteNode(node, "Waiting")
    if fetcher.reason and not fetcher.running:
        return IncompleteNode(node, "Failed", reason=fetcher.reason, message=fetcher.message)
    if not fetcher.running:
        return IncompleteNode(node, "Starting")
    seen = progress.get(fetcher.name, Progress("fetching", 0, 0))
    return IncompleteNode(
        node,
        "Fetching",
        received_bytes=seen.received_bytes,
        total_bytes=seen.total_bytes,
        percent=100 * seen.received_bytes // seen.total_bytes if seen.total_bytes else 0,
        reason=fetcher.reason,
        message=fetcher.message,
    )
