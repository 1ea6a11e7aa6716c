"""The step profiler: announced pauses, and when it starts and ends, as seen by the other ranks."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from skiff_runtime.messages import ProfileSteps, ToLeader
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.step import StepPlan, StepResult
from skiff_runtime.worker.rank import LeaderChannel
from skiff_runtime.worker.step_profiler import FINISH_SECONDS, PAUSE_SECONDS, StepProfiler

NONE, ONE = np.empty(0, np.int32), np.ones(1, np.int32)
PLAN = StepPlan(
    number=1,
    slots=0 * ONE,
    starts=0 * ONE,
    lengths=ONE,
    samples=np.ones(1, np.bool_),
    decode_rows=0,
    opened=(),
    page_slots=NONE,
    page_columns=NONE,
    page_ids=NONE,
)


class Instant:
    """An engine whose steps have run when they are launched."""

    def launch(self, plan: StepPlan) -> "Instant":
        return self

    def wait(self, timeout_seconds: float) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(ONE)


def test_start_and_end_of_a_profile_are_announced(tmp_path: Path) -> None:
    pauses: list[float] = []
    profiler = StepProfiler(pauses.append)
    engine = profiler.wrap(Instant())
    engine.launch(PLAN)
    assert pauses == []
    profiler.begin(ProfileSteps(steps=2, path=str(tmp_path / "trace.json")))
    for _ in range(2):
        profiler.before_turn(idle=False)
        engine.launch(PLAN)
    assert pauses == [FINISH_SECONDS + PAUSE_SECONDS] and list(tmp_path.iterdir()) == []
    profiler.before_turn(idle=False)
    assert pauses == 2 * [FINISH_SECONDS + PAUSE_SECONDS]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


class Events(list[str]):
    """Rank 0 of two ranks: its engine, its messages to rank 1, and torch's profiler, which note in order what they do.

    A step runs until it is waited for, unless ``hangs``.
    """

    hangs = False

    def launch(self, plan: StepPlan) -> "Events":
        self.append("launch")
        return self

    def wait(self, timeout_seconds: float) -> bool:
        self.append("step hangs" if self.hangs else "step has run")
        return not self.hangs

    def result(self) -> StepResult:
        return StepResult(ONE)

    def send_encoded(self, data: bytes) -> None:
        self.append("rank 1 may launch")

    def start(self) -> None:
        self.append("start")

    def stop(self) -> None:
        self.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).touch()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    found = Events()
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: found)
    return found


def test_profiler_starts_and_ends_while_no_rank_can_run_a_step(tmp_path: Path, events: Events) -> None:
    """Else rank 1 would wait in a collective of the next step until rank 0 has written its trace."""
    profiler, endpoints = StepProfiler(), Endpoints(tmp_path)
    engine = profiler.wrap(events)
    channel = LeaderChannel(
        Receiver(endpoints.rank(0), ToLeader),
        endpoints,
        1,
        should_stop=lambda: False,
        profiler=profiler,
        load_grammar=lambda grammar: None,
    )
    channel._followers = [cast(Any, events)]

    def turn() -> list[str]:
        events.clear()
        channel.receive(wait=False, checksum=0)
        engine.launch(PLAN)
        return list(events)

    assert turn() == ["rank 1 may launch", "launch"]
    client = Sender(endpoints.rank(0))
    client.send(ProfileSteps(steps=2, path=str(tmp_path / "trace.json")))
    assert channel._inbox.socket.poll(5000)
    assert turn() == ["step has run", "start", "rank 1 may launch", "launch"]
    assert turn() == ["rank 1 may launch", "launch"]
    assert turn() == ["step has run", "stop", "rank 1 may launch", "launch"]
    assert turn() == ["rank 1 may launch", "launch"]
    assert (tmp_path / "trace.json").exists()


def test_step_that_hangs_keeps_a_profile_from_beginning_and_ending(tmp_path: Path, events: Events) -> None:
    profiler = StepProfiler()
    engine = profiler.wrap(events)
    engine.launch(PLAN)
    events.hangs = True
    profiler.begin(ProfileSteps(steps=1, path=str(tmp_path / "first")))
    assert events == ["launch", "step hangs"]
    events.hangs = False
    profiler.begin(ProfileSteps(steps=1, path=str(tmp_path / "second")))
    engine.launch(PLAN)
    events.hangs = True
    profiler.before_turn(idle=False)
    assert events[-2:] == ["launch", "step hangs"]
    events.hangs = False
    profiler.before_turn(idle=False)
    assert events[-2:] == ["step has run", "stop"]
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
