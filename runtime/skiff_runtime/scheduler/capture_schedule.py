"""The capture schedule: when the engine captures the CUDA graphs that it had not captured before it was ready.

A capture needs all ranks, so it is planned like a step, by counts alone, and every rank plans the same. While nothing
runs, one capture follows the other; a request that arrives waits for one of them at most. While requests run, a capture
delays them, so only some steps carry one.
"""

from typing import Final

CAPTURE_INTERVAL_STEPS: Final = 16
"""Steps of running requests from one capture to the next. Untuned: 50 captures are then spread over 800 steps."""


class CaptureSchedule:
    """Counts the graphs that are still to be captured, and the steps since the last capture."""

    def __init__(self, num_graphs: int) -> None:
        self.num_pending = num_graphs
        self._steps = 0

    def take_idle(self) -> bool:
        """Return whether to capture a graph while nothing runs; it then counts as captured."""
        return self._take()

    def take_busy(self) -> bool:
        """Return whether the step that is being planned carries a capture, which then counts as done."""
        self._steps += 1
        return self._steps >= CAPTURE_INTERVAL_STEPS and self._take()

    def _take(self) -> bool:
        if not self.num_pending:
            return False
        self.num_pending -= 1
        self._steps = 0
        return True
