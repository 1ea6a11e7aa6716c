"""The order in which nodes get a model: one seed reads the source, then each node that has it sends it to one more. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from skiff_operator.model_caches.fetcher import FETCH, Fetcher

PEERS: Final = 3
"""Peers of one fetcher: the one that sends, and others in case it goes."""
EXTRA_SEEDS: Final = 2
"""Nodes that are tried beside a seed that fails, which may be its node's fault."""


class Start(NamedTuple):
    """A fetcher to create on a node, with its peers in the order of preference."""

    node: str
    peers: tuple[Fetcher, ...]


def next_starts(nodes: Sequence[str], fetchers: Sequence[Fetcher]) -> list[Start]:
    """Return the fetchers to create now on nodes that have none.

    As many nodes read at a time as there are peers that have the model, so their number doubles with each round. Fetchers
    that fail do not count: they hold no peer for long.
    """
    live = [each for each in fetchers if each.task == FETCH and not each.terminating]
    ready = sorted((each for each in live if each.ready and each.address), key=_name)
    failing = sum(not each.ready and bool(each.reason) for each in live)
    busy = sum(not each.ready and not each.reason for each in live)
    occupied = {each.node for each in fetchers}
    waiting = [node for node in sorted(nodes) if node not in occupied]
    may_seed = not busy and failing <= EXTRA_SEEDS
    room = len(ready) - busy if ready else int(may_seed)
    return [Start(node, _rotate(ready, busy + i)[:PEERS]) for i, node in enumerate(waiting[: max(room, 0)])]


def _rotate(ready: list[Fetcher], first: int) -> tuple[Fetcher, ...]:
    if not ready:
        return ()
    first %= len(ready)
    return (*ready[first:], *ready[:first])


def _name(fetcher: Fetcher) -> str:
    return fetcher.name
