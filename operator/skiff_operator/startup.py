"""The startup of one pod in seconds, step by step: from the times in its status and from the server's own report. Pure.

The kubelet and the Kubernetes scheduler write times of whole seconds: creation, the assignment to a node, start and end
of the download, start of the server, readiness. The steps inside the server are in the body of its /startupz.

A startup is recorded when the operator sees the pod become ready for the first time. A pod that was ready before the
operator looked is not recorded: its Ready condition may have changed since its start, and then the time would be wrong.
The same holds for a pod whose container was restarted: what went before is a failure, not a start.
"""

import datetime
from typing import Annotated, Any, Final

import msgspec

from skiff_operator.resources.containers import FETCH, RUNTIME
from skiff_operator.resources.metadata import LABEL_REVISION

STEPS: Final = ("scheduled", "pulled", "fetched", "loaded", "profiled", "captured", "ready")
_SERVER_STEPS: Final = {
    "loaded": ("spawn", "config", "weights"),
    "profiled": ("kv_cache",),
    "captured": ("warmup",),
}
"""The server's start phases (`contract.PHASES`) that make up each step."""


class PodStartup(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The startup of a pod: the duration of each step, and of all together. A step that is not known is None.

    `at`: the time (RFC 3339) at which it became ready. `scheduled`: waited for a node; `pulled`: volumes, network and
    images until the first container ran, and from the end of the download until the server ran; `fetched`: the
    download; `loaded`: processes and weights; `profiled`: memory profile and KV cache; `captured`: warm-up and CUDA
    graphs; `ready`: from the creation of the pod until it was ready.
    """

    pod: str
    revision: str
    at: str
    scheduled_seconds: float | None = None
    pulled_seconds: float | None = None
    fetched_seconds: float | None = None
    loaded_seconds: float | None = None
    profiled_seconds: float | None = None
    captured_seconds: float | None = None
    ready_seconds: float | None = None

    def seconds(self) -> dict[str, float]:
        """Return the known durations by step, in the order of `STEPS`."""
        values = {step: getattr(self, f"{step}_seconds") for step in STEPS}
        return {step: value for step, value in values.items() if value is not None}


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A duration that a pod reports about itself, within reason."""


class _Process(msgspec.Struct):
    """One process in the body of /startupz: the seconds of its finished phases."""

    seconds: dict[str, _Seconds]


class _StartupReport(msgspec.Struct):
    processes: dict[str, _Process]


def has_started(pod: dict[str, Any]) -> bool:
    """Return whether the server has passed its startup probe: from then on the pod may have been ready before."""
    found = (pod.get("status") or {}).get("containerStatuses") or []
    return any(each["name"] == RUNTIME and each.get("started") for each in found)


def read(pod: dict[str, Any]) -> PodStartup | None:
    """Read the startup of a pod that has just become ready; None if a container was restarted or times are missing."""
    meta, status = pod["metadata"], pod.get("status") or {}
    inits = {each["name"]: each for each in status.get("initContainerStatuses") or []}
    mains = {each["name"]: each for each in status.get("containerStatuses") or []}
    if any(each.get("restartCount") for each in (*inits.values(), *mains.values())):
        return None
    changed = {each["type"]: each.get("lastTransitionTime") for each in status.get("conditions") or []}
    created, at = _time(meta.get("creationTimestamp")), changed.get("Ready")
    ready = _time(at)
    if created is None or ready is None or ready < created:
        return None
    placed = _time(changed.get("PodScheduled"))
    download = (inits.get(FETCH, {}).get("state") or {}).get("terminated") or {}
    fetch_began, fetch_ended = _time(download.get("startedAt")), _time(download.get("finishedAt"))
    running = (mains.get(RUNTIME, {}).get("state") or {}).get("running") or {}
    served = _time(running.get("startedAt"))
    pulled = _between(placed, fetch_began or served)
    unpacked = _between(fetch_ended, served)
    return PodStartup(
        pod=meta["name"],
        revision=(meta.get("labels") or {}).get(LABEL_REVISION, ""),
        at=str(at),
        scheduled_seconds=_between(created, placed),
        pulled_seconds=pulled if pulled is None or unpacked is None else pulled + unpacked,
        fetched_seconds=_between(fetch_began, fetch_ended),
        ready_seconds=_between(created, ready),
    )


def with_server_steps(startup: PodStartup, body: bytes) -> PodStartup:
    """Add the steps inside the server from the body of its /startupz, each by the process that was slowest in it.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: the body is not such a report.
    """
    report = msgspec.json.decode(body, type=_StartupReport)
    slowest: dict[str, float] = {}
    for process in report.processes.values():
        for phase, seconds in process.seconds.items():
            slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    known = {
        f"{step}_seconds": round(sum(slowest[phase] for phase in phases if phase in slowest), 3)
        for step, phases in _SERVER_STEPS.items()
        if any(phase in slowest for phase in phases)
    }
    return msgspec.structs.replace(startup, **known)


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


def _between(begin: datetime.datetime | None, end: datetime.datetime | None) -> float | None:
    """Return the seconds between two times, at least 0: the clocks of two machines may differ."""
    return None if begin is None or end is None else max(0.0, (end - begin).total_seconds())
