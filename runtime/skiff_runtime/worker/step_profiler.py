"""The step profiler: traces some steps of a rank's engine with torch.profiler when a client requests it.

The profiler's start and the writing of a trace take seconds to minutes, and only rank 0 is profiled. A rank that had
launched a step meanwhile would wait for rank 0 in its first collective, beyond the limit of collectives. So both happen
at the beginning of a turn, before rank 0 sends the turn's messages, without which no rank plans another step, and when
the last step that it has launched has run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from skiff_runtime import log
from skiff_runtime.kernels.torch_internals import profiler_settings
from skiff_runtime.messages import ProfileSteps
from skiff_runtime.step import StepEngine, StepHandle, StepPlan

FINISH_SECONDS: Final = 60.0
"""Time limit for the step that runs when a profile begins or ends."""
PAUSE_SECONDS: Final = 300.0
"""Time that the rank announces for a start of the profiler, which loads libraries, and for writing a trace."""


class StepProfiler:
    """Profiles the engine that it wraps; one profile at a time.

    ``before_turn`` and ``begin`` must be called where no other rank can have launched a step that this one has not.
    """

    def __init__(self, announce_pause: Callable[[float], None] = lambda seconds: None) -> None:
        """``announce_pause(seconds)`` is called before the rank's main loop is busy for up to that time."""
        self._announce_pause = announce_pause
        self._profile: Any = None
        self._request = ProfileSteps(steps=0, path="")
        self._left = 0
        self._last: StepHandle | None = None

    def wrap(self, engine: StepEngine) -> StepEngine:
        """Return the engine with its steps counted."""
        return _ProfiledEngine(engine, self)

    def begin(self, request: ProfileSteps) -> None:
        """Start a profile with the next step; a running one is written first."""
        self.finish()
        self._announce_pause(FINISH_SECONDS + PAUSE_SECONDS)
        if self._profile is not None or not self._has_run():
            reason = f"the last step has not run within {FINISH_SECONDS:g} s"
            log.warning("profile_failed", path=request.path, reason=reason)
            return
        self._request, self._left = request, request.steps
        kinds = torch.profiler.ProfilerActivity
        on_gpu = torch.cuda.is_available()
        # On a GPU its kernels suffice; recording the operations, too, would slow the host that is profiled.
        self._profile = torch.profiler.profile(
            activities=[kinds.CUDA if on_gpu else kinds.CPU],
            experimental_config=profiler_settings(all_threads=not on_gpu),
        )
        self._profile.start()

    def before_turn(self, *, idle: bool) -> None:
        """Write a profile that has all its steps, or any if the rank is ``idle``."""
        if idle or self._left <= 0:
            self.finish()

    def after_launch(self, step: StepHandle) -> None:
        """Note that a step has been launched."""
        self._last = step
        if self._profile is not None:
            self._left -= 1

    def finish(self) -> None:
        """Wait for the profiled steps and write the trace, if a profile runs. The file appears at once, whole.

        If a step takes too long, the profile goes on.
        """
        if self._profile is None:
            return
        self._announce_pause(FINISH_SECONDS + PAUSE_SECONDS)
        if not self._has_run():
            return
        profile, self._profile = self._profile, None
        profile.stop()
        path = Path(self._request.path)
        partial = path.with_name(f".partial-{path.name}")
        try:
            profile.export_chrome_trace(str(partial))
            partial.rename(path)
        except (OSError, RuntimeError) as error:
            log.warning("profile_failed", path=str(path), reason=str(error))
            return
        log.event("profile_written", path=str(path), steps=self._request.steps - self._left)

    def _has_run(self) -> bool:
        """Wait for the last step that was launched; return whether it has run."""
        return self._last is None or self._last.wait(FINISH_SECONDS)


class _ProfiledEngine(StepEngine):
    def __init__(self, engine: StepEngine, profiler: StepProfiler) -> None:
        self._engine = engine
        self._profiler = profiler

    def launch(self, plan: StepPlan) -> StepHandle:
        step = self._engine.launch(plan)
        self._profiler.after_launch(step)
        return step
