"""Routing policies: which of the available pods gets a request.

Among equals, the pod is chosen that comes first in a rotation which each request advances, so that equal pods get equal
shares.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from skiff_router.endpoints import Endpoint

ROUND_ROBIN: Final = "round-robin"
LEAST_LOAD: Final = "least-load"
NAMES: Final = (LEAST_LOAD, ROUND_ROBIN)


class Policy(Protocol):
    """Chooses pods."""

    def choose(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        """Return one of ``endpoints``, which are available, in the order of their names, and at least one."""


class RoundRobin:
    """Each pod in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        """Return the next pod."""
        self._turn = (self._turn + 1) % len(endpoints)
        return endpoints[self._turn]


class LeastLoad:
    """The pod with the fewest requests in flight from this router."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        """Return the least loaded pod."""
        self._turn = (self._turn + 1) % len(endpoints)
        rotated = (*endpoints[self._turn :], *endpoints[: self._turn])
        return min(rotated, key=lambda each: each.in_flight)


def make_policy(name: str) -> Policy:
    """Return the policy called ``name``, one of ``NAMES``."""
    return RoundRobin() if name == ROUND_ROBIN else LeastLoad()
