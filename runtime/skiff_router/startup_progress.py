"""The progress of a pod's start in words, from the report that its server gives while it loads."""

from typing import Final

import msgspec

from skiff_router.endpoints import Backend, Endpoint
from skiff_router.upstream import UpstreamError, format_get
from skiff_router.whole_response import fetch
from skiff_runtime import contract

WAITING: Final = "waiting for a pod"
STARTING: Final = "starting the server"
_SECONDS: Final = 2.0
_MAX_BYTES: Final = 1 << 18
_PHASES: Final = {
    "spawn": "starting the server's processes",
    "config": "reading the model's configuration",
    "weights": "loading weights",
    "kv_cache": "reserving memory",
    "warmup": "warming up",
    "ready": "ready",
}
"""The phases of ``contract.PHASES``, in words."""
_ORDER: Final = {phase: index for index, phase in enumerate(contract.PHASES)}


class _Process(msgspec.Struct):
    phase: str
    progress: float = 0.0


class _Report(msgspec.Struct):
    processes: dict[str, _Process]


def describe(body: bytes) -> str:
    """Describe the process that is farthest from being ready, by the body of /startupz.

    Raises:
        msgspec.DecodeError: The body is no such report.
    """
    report = msgspec.json.decode(body, type=_Report)
    known = [each for each in report.processes.values() if each.phase in _ORDER]
    if not known:
        return STARTING
    last = min(known, key=lambda each: (_ORDER[each.phase], each.progress))
    percent = f" {100 * min(1.0, last.progress):.0f}%" if 0 < last.progress < 1 else ""
    return f"{_PHASES[last.phase]}{percent}"


async def read_progress(backend: Backend) -> str:
    """Return the progress of the first pod that is not ready."""
    loading = [endpoint for endpoint in backend.endpoints if not endpoint.is_available]
    return await _read(loading[0]) if loading else WAITING


async def _read(endpoint: Endpoint) -> str:
    request = format_get(endpoint.address, contract.PATH_STARTUPZ)
    try:
        status, body = await fetch(endpoint.pool, request, seconds=_SECONDS, limit=_MAX_BYTES)
        return describe(body) if status == 200 else STARTING
    except (UpstreamError, TimeoutError, msgspec.DecodeError):
        return STARTING  # it may not listen yet
