"""The processes of one service, and the CPU time that each has used."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from skiff_runtime.errors import SkiffError
from skiff_runtime.processes.launch import Role

SUPERVISOR: Final = "supervisor"
FRONTS: Final = (Role.API, Role.TOKENIZER, Role.DETOKENIZER)
_MODULE: Final = "skiff_runtime.processes.child_process"
_CPUCLOCK_SCHED: Final = 2
"""With the inverted process id above it, Linux's id of a process's CPU clock: see clock_getcpuclockid(3)."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the service. ``role`` is one of ``Role`` or "supervisor"."""

    name: str
    role: str
    handle: psutil.Process

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far, ended ones included. OSError when it has ended itself.

        The kernel's clock of the process counts nanoseconds; what psutil reads is cut to ticks of
        10 ms, too coarse for a process that is nearly idle.
        """
        return time.clock_gettime((~self.handle.pid << 3) | _CPUCLOCK_SCHED)


def service_processes(pid: int) -> list[Process]:
    """The supervisor ``pid`` and its children, in order of name; SkiffError where that is no service."""
    try:
        root = psutil.Process(pid)
        found = [each for child in root.children() if (each := _known(child)) is not None]
    except psutil.Error as error:
        raise SkiffError(f"--pid {pid} cannot be watched: {error}") from error
    if not any(each.role == Role.API for each in found):
        raise SkiffError(f"--pid {pid} has no children of a service; give the process id of `skiff serve`")
    return [Process(SUPERVISOR, SUPERVISOR, root), *sorted(found, key=lambda each: each.name)]


def cpu_seconds(processes: list[Process]) -> Mapping[str, float]:
    """By name: the CPU time used so far; SkiffError when one has ended."""
    try:
        return {each.name: each.cpu_seconds() for each in processes}
    except OSError as error:
        raise SkiffError(f"a process of the service ended while it was watched: {error}") from error


def _known(child: psutil.Process) -> Process | None:
    words = child.cmdline()
    if _MODULE not in words:
        return None
    role, index = words[words.index(_MODULE) + 1 :][:2]
    numbered = role in (Role.TOKENIZER, Role.RANK)
    return Process(f"{role}{index}" if numbered else role, role, child)
