"""How a rank waits for its engine: beating meanwhile, and not for ever."""

import time
from collections.abc import Callable

from skiff_runtime.errors import SkiffError
from skiff_runtime.processes.child_process import HEARTBEAT_INTERVAL_SECONDS
from skiff_runtime.step import StepEngine, StepHandle, StepPlan, StepResult


class StepTimeout(SkiffError):
    """A step took longer than ``--watchdog-timeout``."""


class StepWatchdog:
    """Implements ``step.StepEngine`` by another one; ``beat`` is called while one of its steps is waited for.

    So a long step is no silence. A hung one (in a collective that another rank never joins) raises
    ``StepTimeout`` in whoever waits for it.
    """

    def __init__(self, engine: StepEngine, *, timeout_seconds: float, beat: Callable[[], None]) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._beat = beat

    def launch(self, plan: StepPlan) -> StepHandle:
        return _PatientStep(self, plan, self._engine.launch(plan))

    def await_step(self, plan: StepPlan, step: StepHandle) -> None:
        """Return when the step has run. Steps run one by one, so its time counts from here."""
        deadline = time.monotonic() + self._timeout_seconds
        while not step.wait(min(HEARTBEAT_INTERVAL_SECONDS, self._timeout_seconds)):
            self._beat()
            if time.monotonic() > deadline:
                raise StepTimeout(
                    f"step {plan.number}, of {plan.tokens} tokens in {len(plan.slots)} rows, took longer than "
                    f"{self._timeout_seconds:g} s; if it does not hang, lower --max-num-batched-tokens or raise "
                    "--watchdog-timeout"
                )


class _PatientStep(StepHandle):
    def __init__(self, engine: StepWatchdog, plan: StepPlan, step: StepHandle) -> None:
        self._engine = engine
        self._plan = plan
        self._step = step

    def wait(self, timeout_seconds: float) -> bool:
        return self._step.wait(timeout_seconds)

    def result(self) -> StepResult:
        self._engine.await_step(self._plan, self._step)
        return self._step.result()
