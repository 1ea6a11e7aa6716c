"""Time by kind of step, as the scheduler tells of each."""

from dataclasses import asdict, dataclass

from skiff_runtime.bench.online.results import Figures
from skiff_runtime.messages import StepStats
from skiff_runtime.metrics.definitions import step_kind
from skiff_runtime.metrics.labels import StepKind


@dataclass(slots=True)
class KindTimes:
    """All steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


class StepTimes:
    """Counts steps by their kind, and what they did."""

    def __init__(self) -> None:
        self.kinds = {kind: KindTimes() for kind in StepKind}
        self.prefill_tokens = 0
        self.hit_tokens = 0

    def note(self, stats: StepStats) -> None:
        """A step ended, or there is other news."""
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
        """By kind, and what of ``seconds`` passed outside of steps."""
        kinds = {str(kind): asdict(times) for kind, times in self.kinds.items()}
        within = sum(times.seconds for times in self.kinds.values())
        return {"kinds": kinds, "outside_seconds": max(0.0, seconds - within)}
