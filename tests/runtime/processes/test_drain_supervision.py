"""Supervision during a drain: a silent rank ends it, for which all requests wait; other processes have the drain's limit."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skiff_runtime.config import Config
from skiff_runtime.messages import Heartbeat
from skiff_runtime.processes.heartbeat_monitor import HeartbeatMonitor
from skiff_runtime.processes.supervisor import Supervisor

PROCESSES = ("api", "rank0", "rank1", "detokenizer")


@pytest.mark.parametrize(
    ("silent", "reason"),
    [("rank1", "rank1 has been silent for 10 s (--rank-heartbeat-timeout-seconds)"), ("api", None)],
)
def test_only_ranks_are_watched_during_a_drain(
    monkeypatch: pytest.MonkeyPatch, silent: str, reason: str | None
) -> None:
    """The api process may be busy with the last responses for longer than its limit while serving."""
    now = [0.0]
    monitor = HeartbeatMonitor(Config(rank_heartbeat_timeout_seconds=10), clock=lambda: now[0])
    failures: list[str] = []
    supervisor: Any = cast(Any, Supervisor.__new__(Supervisor))
    supervisor._heartbeats = monitor
    supervisor._children = SimpleNamespace(running=PROCESSES, reap=list)
    supervisor._drain_deadline, supervisor._signals = math.inf, 1
    monkeypatch.setattr(supervisor, "_fail", failures.append)
    for process in PROCESSES:
        monitor.record(Heartbeat(process=process))
    for _ in range(70):
        now[0] += 1.0
        monitor.begin_turn()
        for process in PROCESSES:
            if process != silent:
                monitor.record(Heartbeat(process=process))
        assert supervisor._check_drain() is None
    assert failures[:1] == ([] if reason is None else [reason])
