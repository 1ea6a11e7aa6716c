"""The step profiler: traces some steps of a rank's engine with torch.profiler when a client requests it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from skiff_runtime import log
from skiff_runtime.kernels.torch_internals import profiler_settings
from skiff_runtime.messages import ProfileSteps
from skiff_runtime.step import StepEngine, StepHandle, StepPlan

FINISH_SECONDS: Final = 60.0
"""Time limit for the last step of a profile."""
PAUSE_SECONDS: Final = 300.0
"""Time that the rank announces for a start of the profiler, which loads libraries, and for writing a trace."""


class StepProfiler:
    """Profiles the engine that it wraps; one profile at a time."""

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
        """Start a profile; a running one is written first."""
        self.finish()
        self._announce_pause(PAUSE_SECONDS)
        self._request, self._left = request, request.steps
        kinds = torch.profiler.ProfilerActivity
        on_gpu = torch.cuda.is_available()
        # On a GPU its kernels suffice; recording the operations, too, would slow the host that is profiled.
        self._profile = torch.profiler.profile(
            activities=[kinds.CUDA if on_gpu else kinds.CPU],
            experimental_config=profiler_settings(all_threads=not on_gpu),
        )
        self._profile.start()

    def before_launch(self) -> None:
        """Note that a step is about to be launched: it ends a profile that has all its steps."""
        if self._profile is not None and self._left == 0:
            self.finish()

    def after_launch(self, step: StepHandle) -> None:
        """Note that a step has been launched."""
        if self._profile is not None:
            self._left -= 1
            self._last = step

    def finish(self) -> None:
        """Wait for the profiled steps and write the trace, if a profile runs. The file appears at once, whole."""
        if self._profile is None:
            return
        self._announce_pause(FINISH_SECONDS + PAUSE_SECONDS)
        if self._last is not None:
            self._last.wait(FINISH_SECONDS)
        profile, self._profile, self._last = self._profile, None, None
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


class _ProfiledEngine(StepEngine):
    def __init__(self, engine: StepEngine, profiler: StepProfiler) -> None:
        self._engine = engine
        self._profiler = profiler

    def launch(self, plan: StepPlan) -> StepHandle:
        self._profiler.before_launch()
        step = self._engine.launch(plan)
        self._profiler.after_launch(step)
        return step
