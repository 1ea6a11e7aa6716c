"""Late requests: those that still reach a draining service, from clients that have not noticed the drain.

A client with a pool of connections sends on them whatever the endpoints of a Service are, and a node's proxy may learn late that a
pod has left them. So a drain accepts requests until a second has passed without one, and ends each connection behind its response.
"""

import asyncio
from collections.abc import Callable
from typing import Final

TICK_SECONDS: Final = 0.1
QUIET_TICKS: Final = 10
QUIET_SECONDS: Final = QUIET_TICKS * TICK_SECONDS
"""Time without a late request after which further ones are refused."""
ACCEPT_SECONDS: Final = 10.0
"""Longest time during which late requests are accepted: beyond it, clients learn by refusals that they must go elsewhere."""


class LateRequests:
    """Decides when a draining service begins to refuse requests; ``are_over`` is called every ``TICK_SECONDS``.

    Ticks are counted instead of seconds: a process that gets no CPU for a second has not read its clients' requests either, and that
    is only one tick.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        """``timeout_seconds``: the limit on the whole drain."""
        self.limit_seconds = min(ACCEPT_SECONDS, timeout_seconds)
        self._accepted = 0
        self._quiet_ticks = -1  # the first call comes before the first tick

    def are_over(self, accepted: int, *, elapsed_seconds: float) -> bool:
        """Return whether requests are refused from now on. ``accepted``: late requests so far."""
        if accepted == self._accepted:
            self._quiet_ticks += 1
        else:
            self._accepted, self._quiet_ticks = accepted, 0
        return self._quiet_ticks >= QUIET_TICKS or elapsed_seconds >= self.limit_seconds


async def wait_until_over(count_accepted: Callable[[], int], *, timeout_seconds: float) -> float:
    """Wait until late requests are to be refused, and return the seconds that it took.

    ``count_accepted`` returns the number of late requests so far; ``timeout_seconds`` is the limit on the whole drain.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    late = LateRequests(timeout_seconds=timeout_seconds)
    while True:
        elapsed = loop.time() - began
        if late.are_over(count_accepted(), elapsed_seconds=elapsed):
            return elapsed
        await asyncio.sleep(min(TICK_SECONDS, late.limit_seconds - elapsed))
