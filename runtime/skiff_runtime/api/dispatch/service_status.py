"""State of the service and of its processes: the source of the probes, of /startupz and of admission."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from skiff_runtime.contract import PHASES
from skiff_runtime.errors import Unavailable
from skiff_runtime.messages import PhaseReport, ProcessHealth

MAX_RETRY_SECONDS: Final = 60


class ServiceState(StrEnum):
    """Lifecycle of a service."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_REFUSALS = {
    ServiceState.STARTING: "the model is still being loaded; /startupz shows the progress",
    ServiceState.DRAINING: "the service is shutting down; retry with another replica",
    ServiceState.FAILED: "the service failed and is restarting; retry shortly",
}


@dataclass(slots=True)
class ProcessStartup:
    """Startup of one process: its phase, the progress of that phase from 0 to 1, and the seconds of earlier phases."""

    phase: str = PHASES[0]
    progress: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class ServiceStatus:
    """State of the service, startup of its processes, and their heartbeats."""

    def __init__(self) -> None:
        self.state = ServiceState.STARTING
        self._accepts_late = False
        self.late_requests = 0
        """Requests that were accepted since the drain began."""
        self.kv_tokens = 0
        self._began = time.monotonic()
        self._ready_at: float | None = None
        self._processes: dict[str, ProcessStartup] = {}
        self._health = ProcessHealth([], [], [])
        self._health_received = self._began

    def check_accepts_requests(self) -> None:
        """Raise ``Unavailable`` unless the service accepts new requests. Counts one that a draining service accepts."""
        if self._accepts_late:
            self.late_requests += 1
        elif self.state is not ServiceState.READY:
            raise Unavailable(_REFUSALS[self.state], retry_after_seconds=self._retry_after_seconds())

    def _retry_after_seconds(self) -> int:
        """Return the estimated delay until the service is ready.

        A start is expected to take as long again as it has taken, a restart as long as the start took. A draining
        service does not come back, and its other replicas are ready now.
        """
        now = time.monotonic()
        if self.state is ServiceState.DRAINING:
            return 1
        start_end = self._ready_at if self._ready_at is not None else now
        return min(MAX_RETRY_SECONDS, 1 + int(start_end - self._began))

    def record_phase(self, report: PhaseReport) -> None:
        """Record that a process entered a phase, or progressed in it."""
        process = self._processes.setdefault(report.process, ProcessStartup())
        if report.phase != process.phase:
            process.seconds[process.phase] = report.seconds
            process.phase = report.phase
        process.progress = report.progress

    def mark_ready(self, kv_tokens: int) -> None:
        """Record that every process is ready. A service that drains or has failed already stays so."""
        self.kv_tokens = kv_tokens
        for process in self._processes.values():
            process.phase, process.progress = PHASES[-1], 1.0
        self._ready_at = time.monotonic()
        if self.state is ServiceState.STARTING:
            self.state = ServiceState.READY

    def mark_draining(self) -> bool:
        """Fail the readiness probe; requests are accepted until ``refuse_requests``. Returns False if it drains or has failed."""
        if self.state not in (ServiceState.STARTING, ServiceState.READY):
            return False
        self._accepts_late = self.state is ServiceState.READY
        self.state = ServiceState.DRAINING
        return True

    def refuse_requests(self) -> None:
        """Refuse all further requests of a service that drains."""
        self._accepts_late = False

    def mark_failed(self) -> bool:
        """Record the failure of the service. Returns False if it has failed already."""
        if self.state is ServiceState.FAILED:
            return False
        self._accepts_late = False
        self.state = ServiceState.FAILED
        return True

    def record_heartbeats(self, health: ProcessHealth) -> None:
        """Record the supervisor's report of each process's last heartbeat."""
        self._health = health
        self._health_received = time.monotonic()

    def heartbeats(self) -> list[tuple[str, bool, float]]:
        """Return (name, whether it runs, seconds since its last heartbeat) for each process, as last reported."""
        since = time.monotonic() - self._health_received
        health = zip(self._health.processes, self._health.running, self._health.ages, strict=True)
        return [(name, running, age + since) for name, running, age in health]

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each finished phase in the process that was slowest in it."""
        slowest: dict[str, float] = {}
        for process in self._processes.values():
            for phase, seconds in process.seconds.items():
                slowest[phase] = max(seconds, slowest.get(phase, 0.0))
        return {phase: slowest[phase] for phase in PHASES if phase in slowest}

    def startup_report(self) -> dict[str, Any]:
        """Return the body of /startupz. ``elapsed_seconds``: duration of the start so far, or in all once it is ready."""
        processes = {
            name: {
                "phase": process.phase,
                "progress": round(process.progress, 4),
                "seconds": {phase: round(seconds, 3) for phase, seconds in process.seconds.items()},
            }
            for name, process in sorted(self._processes.items())
        }
        elapsed = round((self._ready_at or time.monotonic()) - self._began, 3)
        return {"status": self.state, "elapsed_seconds": elapsed, "processes": processes}
