"""Where the service stands: which start phase each process is in, whether it is ready, draining or failed."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from skiff_runtime.contract import PHASES
from skiff_runtime.errors import Unavailable
from skiff_runtime.messages import PhaseReport, ProcessHealth

MAX_RETRY_SECONDS: Final = 60


class State(StrEnum):
    """Life of a service."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_REFUSALS = {
    State.STARTING: "the model is still being loaded; /startupz tells how far it is",
    State.DRAINING: "the service is shutting down; retry with another replica",
    State.FAILED: "the service failed and restarts; retry shortly",
}


@dataclass(slots=True)
class ProcessStartup:
    """How far one process is, and how many seconds its earlier phases took."""

    phase: str = PHASES[0]
    progress: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class ServiceStatus:
    """What the probes tell."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.kv_tokens = 0
        self._began = time.monotonic()
        self._served: float | None = None
        self._processes: dict[str, ProcessStartup] = {}
        self._beats = ProcessHealth([], [], [])
        self._told_beats = self._began

    def check_accepts_requests(self) -> None:
        """Raise ``Unavailable`` unless new requests are served."""
        if self.state is not State.READY:
            raise Unavailable(_REFUSALS[self.state], retry_after_seconds=self._retry_seconds())

    def _retry_seconds(self) -> int:
        """A start is thought to take as long again as it has, a restart as long as the start did; others serve now."""
        now = time.monotonic()
        if self.state is State.DRAINING:
            return 1
        began_until = self._served if self._served is not None else now
        return min(MAX_RETRY_SECONDS, 1 + int(began_until - self._began))

    def note(self, report: PhaseReport) -> None:
        """A process entered a phase, or came further in it."""
        process = self._processes.setdefault(report.process, ProcessStartup())
        if report.phase != process.phase:
            process.seconds[process.phase] = report.seconds
            process.phase = report.phase
        process.progress = report.progress

    def mark_ready(self, kv_tokens: int) -> None:
        """Every process serves."""
        self.kv_tokens = kv_tokens
        for process in self._processes.values():
            process.phase, process.progress = PHASES[-1], 1.0
        self._served = time.monotonic()
        if self.state is State.STARTING:
            self.state = State.READY

    def record_heartbeats(self, beats: ProcessHealth) -> None:
        """The supervisor tells when each process was last heard of."""
        self._beats = beats
        self._told_beats = time.monotonic()

    def heartbeats(self) -> list[tuple[str, bool, float]]:
        """Each process with whether it runs and how many seconds it has been silent, as far as is known here."""
        since = time.monotonic() - self._told_beats
        told = zip(self._beats.processes, self._beats.running, self._beats.ages, strict=True)
        return [(name, running, age + since) for name, running, age in told]

    def phase_seconds(self) -> dict[str, float]:
        """Seconds that each finished phase took in the process that was slowest in it."""
        slowest: dict[str, float] = {}
        for process in self._processes.values():
            for phase, seconds in process.seconds.items():
                slowest[phase] = max(seconds, slowest.get(phase, 0.0))
        return {phase: slowest[phase] for phase in PHASES if phase in slowest}

    def report(self) -> dict[str, Any]:
        """For /startupz. ``elapsed_seconds``: how long the start takes, or took."""
        processes = {
            name: {
                "phase": process.phase,
                "progress": round(process.progress, 4),
                "seconds": {phase: round(seconds, 3) for phase, seconds in process.seconds.items()},
            }
            for name, process in sorted(self._processes.items())
        }
        elapsed = round((self._served or time.monotonic()) - self._began, 3)
        return {"status": self.state, "elapsed_seconds": elapsed, "processes": processes}
