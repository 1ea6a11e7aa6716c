"""The model of step times and ends of requests that a pod publishes, fitted to its own steps."""

from typing import Final

from skiff_runtime.messages import StepStats

_WEIGHT: Final = 0.05
"""Of the newest step in the moving averages: they follow the last 20 or so."""


class StepTimeModel:
    """Fits seconds = ``step_seconds`` + ``prefill_token_seconds`` x prompt tokens of the step.

    The first is the mean of recent steps without prompts, so it follows the number of running requests; the second is the
    ratio of sums over recent steps with prompts, so that long chunks count more. A whole regression would lose the slope
    whenever all recent steps are alike.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.finish_seconds = 0.0
        """Mean time between the ends of requests while others wait."""
        self._last_finish = 0.0
        self._prefill_seconds = 0.0
        self._prefill_tokens = 0.0

    @property
    def prefill_token_seconds(self) -> float:
        """Return the seconds of one prompt token; 0 before the first."""
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0

    def record(self, stats: StepStats) -> None:
        """Take one step into account."""
        if stats.prefill_tokens:
            beyond = max(0.0, stats.step_seconds - (self.step_seconds if stats.decode_tokens else 0.0))
            self._prefill_seconds += _WEIGHT * (beyond - self._prefill_seconds)
            self._prefill_tokens += _WEIGHT * (stats.prefill_tokens - self._prefill_tokens)
        elif stats.decode_tokens:
            weight = _WEIGHT if self.step_seconds else 1.0
            self.step_seconds += weight * (stats.step_seconds - self.step_seconds)

    def record_finishes(self, count: int, now: float, *, others_wait: bool) -> None:
        """Take ``count`` requests into account that end at ``now``, in seconds of any clock."""
        if others_wait and self._last_finish:
            weight = _WEIGHT if self.finish_seconds else 1.0
            self.finish_seconds += weight * ((now - self._last_finish) / count - self.finish_seconds)
        self._last_finish = now
