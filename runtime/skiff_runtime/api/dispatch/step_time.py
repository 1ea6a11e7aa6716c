"""The model of step times and ends of requests that a pod publishes, fitted to its own steps."""

from typing import Final

from skiff_runtime.messages import StepStats

_WEIGHT: Final = 0.05
"""Of the newest step in the moving averages: they follow the last 20 or so."""
_PREFILL_WEIGHT: Final = 0.005
"""The same of steps with prompts, for the seconds of a token. They depend on the model and the GPU, not on the load, and
routers compare them between pods, so noise costs more than a slow change."""


class StepTimeModel:
    """Fits seconds = ``step_seconds`` + ``prefill_token_seconds`` x prompt tokens of the step.

    The first is the mean of recent steps without prompts, so it follows the number of running requests. The second is the
    least-squares slope through the first over steps with prompts, so that a chunk counts by the square of its length: a short
    one costs nothing while the GPU reads the weights, and would make all tokens look cheap. A regression of both would
    lose the slope whenever all recent steps are alike.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.finish_seconds = 0.0
        """Mean time between the ends of requests while others wait."""
        self._last_finish = 0.0
        self._products = 0.0
        self._squares = 0.0

    @property
    def prefill_token_seconds(self) -> float:
        """Return the seconds of one prompt token; 0 before the first."""
        return self._products / self._squares if self._squares else 0.0

    def record(self, stats: StepStats) -> None:
        """Take one step into account."""
        if tokens := stats.prefill_tokens:
            beyond = max(0.0, stats.step_seconds - (self.step_seconds if stats.decode_tokens else 0.0))
            self._products += _PREFILL_WEIGHT * (tokens * beyond - self._products)
            self._squares += _PREFILL_WEIGHT * (tokens * tokens - self._squares)
        elif stats.decode_tokens:
            weight = _WEIGHT if self.step_seconds else 1.0
            self.step_seconds += weight * (stats.step_seconds - self.step_seconds)

    def record_finishes(self, count: int, now: float, *, others_wait: bool) -> None:
        """Take ``count`` requests into account that end at ``now``, in seconds of any clock."""
        if others_wait and self._last_finish:
            weight = _WEIGHT if self.finish_seconds else 1.0
            self.finish_seconds += weight * ((now - self._last_finish) / count - self.finish_seconds)
        self._last_finish = now
