"""Faults inside one rank of a service, which no signal can cause.

A ``sitecustomize`` module in ``PYTHONPATH``, which Python imports at its start, installs the fault in the process of that
rank alone. It waits for a file, so that a test decides when it begins.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

_STARTER: Final = """\
import sys
if sys.orig_argv[3:5] == ["rank", "{rank}"]:
    sys.path.append({support!r})
    from rank_faults import install
    install({fault!r}, {trigger!r})
"""


class RankFault(StrEnum):
    """A fault of one rank.

    HANG: its engine's thread stops before a step, and the other ranks wait for it inside a collective; heartbeats go on.
    DIVERGE: it loses a page of its KV cache, so it plans other steps from then on.
    NO_MEMORY: it can allocate no more memory than it has once it is configured.
    LATE: it joins the others at the start only once the file exists.
    """

    HANG = "hang"
    DIVERGE = "diverge"
    NO_MEMORY = "no-memory"
    LATE = "late"


@dataclass(frozen=True)
class PlantedFault:
    """The variables with which a service must be started, and the file that begins the fault, or ends a late start."""

    environment: dict[str, str]
    trigger: Path

    def begin(self) -> None:
        self.trigger.touch()

    def end(self) -> None:
        self.trigger.unlink()


def plant(directory: Path, rank: int, fault: RankFault) -> PlantedFault:
    """Prepare a fault of ``rank``; ``directory`` must be new."""
    directory.mkdir()
    trigger = directory / "begin"
    support = str(Path(__file__).parent)
    starter = _STARTER.format(rank=rank, support=support, fault=str(fault), trigger=str(trigger))
    (directory / "sitecustomize.py").write_text(starter)
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    return PlantedFault({"PYTHONPATH": path}, trigger)


def install(fault: str, trigger: str) -> None:
    """Install the fault in this process."""
    _INSTALLERS[RankFault(fault)](Path(trigger))


def _hang(trigger: Path) -> None:
    from skiff_runtime.engine.engine import Engine

    run = Engine._run

    def run_or_hang(self: Engine, plan: Any, copies: Any) -> Any:
        _wait_while(trigger.exists)
        return run(self, plan, copies)

    Engine._run = run_or_hang  # type: ignore[method-assign]


def _diverge(trigger: Path) -> None:
    from skiff_runtime.scheduler.step_planner import StepPlanner

    plan = StepPlanner.plan
    lost: list[Any] = []

    def plan_otherwise(self: StepPlanner) -> Any:
        if not lost and trigger.exists():
            lost.append(self._kv_cache._pool.allocate(1))
        return plan(self)

    StepPlanner.plan = plan_otherwise  # type: ignore[method-assign]


def _exhaust_memory(trigger: Path) -> None:
    import torch

    from skiff_runtime.engine.model_runner import ModelRunner

    load = ModelRunner._load

    def load_without_memory(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1e-6)
        else:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        return load(self, *arguments, **options)

    ModelRunner._load = load_without_memory  # type: ignore[method-assign]


def _join_late(trigger: Path) -> None:
    from skiff_runtime.distributed import tensor_parallel

    join = tensor_parallel._join

    def join_late(*arguments: Any, **options: Any) -> None:
        _wait_while(lambda: not trigger.exists())
        join(*arguments, **options)

    tensor_parallel._join = join_late


def _wait_while(condition: Callable[[], bool]) -> None:
    while condition():
        time.sleep(0.05)


_INSTALLERS: Final = {
    RankFault.HANG: _hang,
    RankFault.DIVERGE: _diverge,
    RankFault.NO_MEMORY: _exhaust_memory,
    RankFault.LATE: _join_late,
}
