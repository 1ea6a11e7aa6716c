"""CPU time of the processes of one service."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from skiff_runtime.errors import SkiffError
from skiff_runtime.processes.launch import Role

SUPERVISOR: Final = "supervisor"
FRONTEND_ROLES: Final = (Role.API, Role.TOKENIZER, Role.DETOKENIZER)
_MODULE: Final = "skiff_runtime.processes.child_process"
_CPUCLOCK_SCHED: Final = 2
"""Linux builds the id of a process's CPU clock from these bits and the inverted process id: clock_getcpuclockid(3)."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One process of a service. ``role`` is one of ``Role`` or "supervisor"."""

    name: str
    role: str
    handle: psutil.Process

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads so far. Raises OSError if it has ended."""
        return read_cpu_seconds(self.handle.pid)


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, ended ones included. Raises OSError if it has ended.

    The process's clock counts nanoseconds. psutil reads ticks of 10 ms, too coarse for a process that is nearly idle.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def find_service_processes(pid: int) -> list[ServiceProcess]:
    """Return the supervisor ``pid`` and its child processes, by name. Raises SkiffError if it is no supervisor."""
    try:
        root = psutil.Process(pid)
        found = [each for child in root.children() if (each := identify_child(child)) is not None]
    except psutil.Error as error:
        raise SkiffError(f"--pid {pid} cannot be watched: {error}") from error
    if not any(each.role == Role.API for each in found):
        raise SkiffError(
            f"--pid {pid} has no child processes of a service; give the process id of `skiff serve`"
        )
    return [ServiceProcess(SUPERVISOR, SUPERVISOR, root), *sorted(found, key=lambda each: each.name)]


def cpu_seconds(processes: list[ServiceProcess]) -> Mapping[str, float]:
    """Return the CPU time used so far, by process name. Raises SkiffError if a process has ended."""
    try:
        return {each.name: each.cpu_seconds() for each in processes}
    except OSError as error:
        raise SkiffError(f"a process of the service ended during the measurement: {error}") from error


def identify_child(child: psutil.Process) -> ServiceProcess | None:
    """Return a child of a supervisor by its command line, or None if it is no process of a service, or has ended."""
    try:
        words = child.cmdline()
    except psutil.NoSuchProcess:
        return None
    if _MODULE not in words:
        return None
    role, index = words[words.index(_MODULE) + 1 :][:2]
    numbered = role in (Role.TOKENIZER, Role.RANK)
    return ServiceProcess(f"{role}{index}" if numbered else role, role, child)
