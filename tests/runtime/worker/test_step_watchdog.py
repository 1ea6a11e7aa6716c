"""The step watchdog sends heartbeats while it waits for a step, and gives up on one that hangs."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from skiff_runtime.step import StepPlan, StepResult
from skiff_runtime.worker import step_watchdog
from skiff_runtime.worker.step_watchdog import StepTimeout, StepWatchdog


class Slow:
    """An engine whose only step runs until ``done`` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def launch(self, plan: StepPlan) -> "Slow":
        return self

    def wait(self, timeout_seconds: float) -> bool:
        return self.done.wait(timeout_seconds)

    def result(self) -> StepResult:
        assert self.done.is_set()
        return StepResult(np.array([7], np.int32))


@pytest.fixture
def plan() -> StepPlan:
    none, one = np.empty(0, np.int32), np.ones(1, np.int32)
    return StepPlan(
        number=3,
        slots=0 * one,
        starts=0 * one,
        lengths=5 * one,
        samples=np.ones(1, np.bool_),
        decode_rows=0,
        opened=(),
        page_slots=none,
        page_columns=none,
        page_ids=none,
    )


def test_heartbeats_continue_during_a_long_step(monkeypatch: pytest.MonkeyPatch, plan: StepPlan) -> None:
    monkeypatch.setattr(step_watchdog, "HEARTBEAT_INTERVAL_SECONDS", 0.01)
    slow, beats = Slow(), list[float]()

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 5:
            slow.done.set()

    handle = StepWatchdog(slow, timeout_seconds=60, beat=beat).launch(plan)
    assert handle.result().tokens.tolist() == [7]
    assert len(beats) == 5


def test_hung_step_raises_step_timeout(plan: StepPlan) -> None:
    beats = list[None]()
    handle = StepWatchdog(Slow(), timeout_seconds=0.1, beat=lambda: beats.append(None)).launch(plan)
    with pytest.raises(StepTimeout, match=r"step 3, of 5 tokens in 1 rows, took longer than 0\.1 s"):
        handle.result()
    assert beats


def test_finished_step_is_not_waited_for(plan: StepPlan) -> None:
    slow, beats = Slow(), list[None]()
    slow.done.set()
    assert StepWatchdog(slow, timeout_seconds=60, beat=lambda: beats.append(None)).launch(plan).wait(0)
    assert not beats


def test_time_in_which_the_rank_is_suspended_hardly_counts(
    monkeypatch: pytest.MonkeyPatch, plan: StepPlan
) -> None:
    slow = Slow()
    now = [0.0]

    def wait(timeout_seconds: float) -> bool:
        now[0] += 3600.0 if now[0] == 0 else timeout_seconds
        return slow.done.is_set()

    def beat() -> None:
        if now[0] > 3605:
            slow.done.set()

    monkeypatch.setattr(slow, "wait", wait)
    monkeypatch.setattr(step_watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert StepWatchdog(slow, timeout_seconds=60, beat=beat).launch(plan).result().tokens.tolist() == [7]
