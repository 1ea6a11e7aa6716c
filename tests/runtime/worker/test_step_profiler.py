"""The step profiler announces the pauses in which its rank sends no heartbeats."""

from pathlib import Path

import numpy as np

from skiff_runtime.messages import ProfileSteps
from skiff_runtime.step import StepPlan, StepResult
from skiff_runtime.worker.step_profiler import FINISH_SECONDS, PAUSE_SECONDS, StepProfiler

NONE, ONE = np.empty(0, np.int32), np.ones(1, np.int32)
PLAN = StepPlan(
    number=1,
    slots=0 * ONE,
    starts=0 * ONE,
    lengths=ONE,
    samples=np.ones(1, np.bool_),
    decode_rows=0,
    opened=(),
    page_slots=NONE,
    page_columns=NONE,
    page_ids=NONE,
)


class Instant:
    """An engine whose steps have run when they are launched."""

    def launch(self, plan: StepPlan) -> "Instant":
        return self

    def wait(self, timeout_seconds: float) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(ONE)


def test_start_and_end_of_a_profile_are_announced(tmp_path: Path) -> None:
    pauses: list[float] = []
    profiler = StepProfiler(pauses.append)
    engine = profiler.wrap(Instant())
    engine.launch(PLAN)
    assert pauses == []
    profiler.begin(ProfileSteps(steps=2, path=str(tmp_path / "trace.json")))
    for _ in range(2):
        engine.launch(PLAN)
    assert pauses == [PAUSE_SECONDS] and list(tmp_path.iterdir()) == []
    engine.launch(PLAN)
    assert pauses == [PAUSE_SECONDS, FINISH_SECONDS + PAUSE_SECONDS]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
