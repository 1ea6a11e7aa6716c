"""The step watchdog: a rank sends heartbeats while it waits for its engine, and gives up on a step that hangs."""

import time
from collections.abc import Callable

from skiff_runtime.errors import SkiffError
from skiff_runtime.processes.child_process import HEARTBEAT_INTERVAL_SECONDS
from skiff_runtime.processes.heartbeat_monitor import MAX_TURN_SECONDS
from skiff_runtime.step import StepEngine, StepHandle, StepPlan, StepResult


class StepTimeout(SkiffError):
    """A step took longer than ``--watchdog-timeout``."""


class StepWatchdog:
    """Wraps a ``StepEngine``: calls ``beat`` while waiting for a step, and raises ``StepTimeout`` if it hangs.

    So a long step does not look like a dead process. A step hangs, for example, in a collective that another
    rank never joins. Time counts as in ``HeartbeatMonitor``: hardly while this process is suspended.
    """

    def __init__(self, engine: StepEngine, *, timeout_seconds: float, beat: Callable[[], None]) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._beat = beat

    def launch(self, plan: StepPlan) -> StepHandle:
        return _WatchedStep(self, plan, self._engine.launch(plan))

    def await_step(self, plan: StepPlan, step: StepHandle) -> None:
        """Wait until the step has run. Its time counts from this call, not its launch: steps run one by one."""
        waited, turn_began = 0.0, time.monotonic()
        while not step.wait(min(HEARTBEAT_INTERVAL_SECONDS, self._timeout_seconds)):
            self._beat()
            now = time.monotonic()
            waited += min(now - turn_began, MAX_TURN_SECONDS)
            turn_began = now
            if waited > self._timeout_seconds:
                raise StepTimeout(
                    f"step {plan.number}, of {plan.num_tokens} tokens in {len(plan.slots)} rows, took longer than "
                    f"{self._timeout_seconds:g} s; if it does not hang, lower --max-num-batched-tokens or raise "
                    "--watchdog-timeout"
                )


class _WatchedStep(StepHandle):
    def __init__(self, engine: StepWatchdog, plan: StepPlan, step: StepHandle) -> None:
        self._engine = engine
        self._plan = plan
        self._step = step

    def wait(self, timeout_seconds: float) -> bool:
        return self._step.wait(timeout_seconds)

    def result(self) -> StepResult:
        self._engine.await_step(self._plan, self._step)
        return self._step.result()
