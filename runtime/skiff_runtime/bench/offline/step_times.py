"""Durations of steps by kind, summed up from the scheduler's statistics."""

from dataclasses import asdict, dataclass

from skiff_runtime.bench.report import Figures
from skiff_runtime.messages import StepStats
from skiff_runtime.metrics.definitions import step_kind
from skiff_runtime.metrics.labels import StepKind


@dataclass(slots=True)
class KindTimes:
    """Totals of all steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


class StepTimes:
    """Totals of the steps of a round, by kind."""

    def __init__(self) -> None:
        self.kinds = {kind: KindTimes() for kind in StepKind}
        self.prefill_tokens = 0
        self.hit_tokens = 0

    def record(self, stats: StepStats) -> None:
        """Add a step's statistics. A batch that reports no computed step adds to no kind."""
        self.hit_tokens += stats.hit_tokens
        self.prefill_tokens += stats.prefill_tokens
        kind = step_kind(stats)
        if kind is None:
            return
        times = self.kinds[kind]
        times.steps += 1
        times.seconds += stats.step_seconds
        times.tokens += stats.prefill_tokens + stats.decode_tokens

    def figures(self, seconds: float) -> Figures:
        """Return the totals by kind, and the part of ``seconds`` that lies outside of steps."""
        kinds = {str(kind): asdict(times) for kind, times in self.kinds.items()}
        within = sum(times.seconds for times in self.kinds.values())
        return {"kinds": kinds, "outside_seconds": max(0.0, seconds - within)}
