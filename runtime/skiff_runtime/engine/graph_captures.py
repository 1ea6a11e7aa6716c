"""CUDA graph captures of a rank: some before the engine is ready, the others, deferred, while it serves.

To capture all graphs takes about a second. A service that starts needs graphs of few rows first, since those steps are
bound by launches the most, and one request may come before any other. Steps of a size that has no graph yet launch the same
kernels one by one, so the tokens are the same.

The largest decode graph is captured before ready, too, and before all smaller ones: the others then fit into its memory,
as the memory profile assumes. The memory of deferred graphs is reserved when the KV cache is sized. Other processes of the
GPU may take it nevertheless, so each deferred capture first compares what is free with what it and the largest step need,
and all ranks agree; without room all graphs that are left are given up, for good, rather than to run out of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from skiff_runtime import log

MAX_EARLY_ROWS: Final = 8
"""Largest decode graph, in rows, that is captured before the engine is ready."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CaptureTask:
    """The capture of the graphs of one step size.

    Attributes:
        size: padded number of rows or tokens.
        capture: captures them, once it has run the same work on the current stream.
        needed_bytes: memory that it takes at most.
    """

    size: int
    capture: Callable[[], None]
    needed_bytes: int = 0


def order_captures(
    decode: Sequence[CaptureTask], prefill: Sequence[CaptureTask]
) -> tuple[list[CaptureTask], list[CaptureTask]]:
    """Return the tasks for before the engine is ready, and the deferred ones; both arguments begin with the largest task.

    Of each kind the largest comes first, then the others by size, because a service fills up gradually.
    """
    early = [*decode[:1], *(task for task in decode[1:] if task.size <= MAX_EARLY_ROWS)]
    late = sorted((task for task in decode[1:] if task.size > MAX_EARLY_ROWS), key=lambda task: task.size)
    return early, [*late, *prefill[:1], *sorted(prefill[1:], key=lambda task: task.size)]


class GraphCaptures:
    """The tasks in their order; the engine's thread runs one at a time."""

    def __init__(
        self,
        early: Sequence[CaptureTask],
        deferred: Sequence[CaptureTask],
        *,
        has_room: Callable[[int], bool],
        all_ranks: Callable[[bool], bool],
    ) -> None:
        """``has_room(bytes)`` compares with this rank's memory; ``all_ranks(ok)`` is True if ``ok`` is True on every rank."""
        self._early = list(early)
        self._deferred = list(deferred)
        self._has_room = has_room
        self._all_ranks = all_ranks
        self._total = len(early) + len(deferred)
        self._seconds = 0.0

    @property
    def num_early(self) -> int:
        """Number of tasks that must run before the engine is ready."""
        return len(self._early)

    @property
    def num_deferred(self) -> int:
        """Number of tasks that are left for later."""
        return len(self._deferred)

    @property
    def deferred_bytes(self) -> int:
        """Memory that all deferred tasks together take at most."""
        return sum(task.needed_bytes for task in self._deferred)

    def capture_early(self) -> None:
        """Run the next early task."""
        self._run(self._early.pop(0))

    def capture_deferred(self) -> None:
        """Run the next deferred task, unless the memory lacks on any rank; do nothing once none is left.

        To be called by all ranks at the same place in the order of steps, since a capture contains collectives.
        """
        if not self._deferred:
            return
        if self._all_ranks(self._has_room(self._deferred[0].needed_bytes)):
            self._run(self._deferred.pop(0))
        else:
            self.give_up()

    def give_up(self) -> None:
        """Drop all deferred tasks: steps of their sizes run without a graph."""
        log.warning(
            "graph_captures_given_up",
            reason="the memory that they need is in use, perhaps by another process on the GPU",
            sizes=len(self._deferred),
            needed_mib=self.deferred_bytes // MIB,
        )
        self._deferred.clear()

    def _run(self, task: CaptureTask) -> None:
        started = monotonic()
        task.capture()
        self._seconds += monotonic() - started
        if not self._early and not self._deferred:
            log.event("graphs_captured", sizes=self._total, seconds=round(self._seconds, 2))
