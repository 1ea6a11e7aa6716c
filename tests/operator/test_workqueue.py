"""The queue's promises: one entry per key, one worker per key, nothing lost, urgent stages first, backing off."""

import asyncio
import random

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skiff_operator.kinds import Stage
from skiff_operator.workqueue import LAST_RETRY_SECONDS, PATIENCE_SECONDS, Key, Schedule, WorkQueue

KEYS = st.sampled_from([("ns", name) for name in "abcde"])
STAGES = st.sampled_from(list(Stage))


class Histories(RuleBasedStateMachine):
    """Any order of adding, taking, finishing and failing, at any pace."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.now = 0.0
        self.asked: set[Key] = set()
        self.running: set[Key] = set()

    @rule(key=KEYS, stage=STAGES, delay=st.floats(0, 100))
    def add(self, key: Key, stage: Stage, delay: float) -> None:
        self.schedule.add(key, stage, self.now, delay)
        self.asked.add(key)

    @rule()
    def take(self) -> None:
        key = self.schedule.take(self.now)
        if key is not None:
            assert key not in self.running, "two workers on one key"
            assert key in self.asked, "a key that nobody asked for"
            self.running.add(key)
            self.asked.discard(key)

    @precondition(lambda self: self.running)
    @rule(failed=st.booleans(), choice=st.randoms(use_true_random=False))
    def finish(self, failed: bool, choice: random.Random) -> None:
        key = choice.choice(sorted(self.running))
        self.running.discard(key)
        self.schedule.finish(key, self.now, failed=failed)
        if failed:
            self.asked.add(key)

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_entry_per_key(self) -> None:
        assert len(self.schedule) == len(self.asked - self.running)

    def teardown(self) -> None:
        """Whatever happened, every key that was asked for is processed in the end."""
        for key in sorted(self.running):
            self.schedule.finish(key, self.now)
        self.now += LAST_RETRY_SECONDS + 200
        seen = set()
        while (due := self.schedule.take(self.now)) is not None:
            seen.add(due)
            self.schedule.finish(due, self.now)
        assert seen == self.asked


TestHistories = Histories.TestCase


def drain(schedule: Schedule, now: float) -> list[str]:
    """Names of all keys that are due, in the order in which they come."""
    names = []
    while (key := schedule.take(now)) is not None:
        names.append(key[1])
        schedule.finish(key, now)
    return names


def test_missing_children_come_before_services_before_status() -> None:
    schedule = Schedule()
    for number, stage in enumerate((Stage.STATUS, Stage.NETWORK, Stage.CHILDREN)):
        schedule.add(("ns", stage.name), stage, now=float(number))
    assert drain(schedule, 3.0) == ["CHILDREN", "NETWORK", "STATUS"]


def test_status_does_not_starve_behind_a_stream_of_new_children() -> None:
    schedule = Schedule()
    schedule.add(("ns", "status"), Stage.STATUS, now=0.0)
    patience = PATIENCE_SECONDS[Stage.STATUS]
    schedule.add(("ns", "late child"), Stage.CHILDREN, now=patience + 1)
    assert drain(schedule, patience + 1) == ["status", "late child"]


def test_asking_again_keeps_the_earlier_time_and_the_more_urgent_stage() -> None:
    schedule = Schedule()
    schedule.add(("ns", "a"), Stage.STATUS, now=0.0, delay_seconds=0.5)
    schedule.add(("ns", "a"), Stage.STATUS, now=0.4, delay_seconds=0.5)
    assert schedule.take(0.5) == ("ns", "a")
    assert schedule.take(10.0) is None


def test_asked_for_while_running_comes_again() -> None:
    schedule = Schedule()
    key = ("ns", "a")
    schedule.add(key, Stage.CHILDREN, now=0.0)
    assert schedule.take(0.0) == key
    schedule.add(key, Stage.CHILDREN, now=0.0)
    assert schedule.take(0.0) is None
    schedule.finish(key, now=0.0)
    assert schedule.take(0.0) == key


@given(failures=st.integers(1, 30))
def test_retries_back_off_from_a_second_to_five_minutes(failures: int) -> None:
    schedule, key, now = Schedule(), ("ns", "a"), 0.0
    schedule.add(key, Stage.CHILDREN, now)
    for count in range(failures):
        assert schedule.take(now) == key
        schedule.finish(key, now, failed=True)
        delay = min(2.0**count, LAST_RETRY_SECONDS)
        assert schedule.take(now + delay * 0.99) is None
        now += delay
    assert schedule.take(now) == key
    schedule.finish(key, now)
    schedule.add(key, Stage.CHILDREN, now)
    assert schedule.take(now) == key
    schedule.finish(key, now, failed=True)
    assert schedule.take(now + 1.0) == key, "success starts the backing off anew"


@pytest.mark.parametrize("workers", [1, 8])
def test_workers_share_the_keys_and_never_one_key(workers: int) -> None:
    async def run() -> dict[Key, int]:
        queue, counts, running = WorkQueue(), dict[Key, int](), set[Key]()
        chance, idle = random.Random(workers), asyncio.Event()

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in running
                running.add(key)
                await asyncio.sleep(chance.random() / 1000)
                running.discard(key)
                counts[key] = counts.get(key, 0) + 1
                queue.done(key)
                if not len(queue) and not running:
                    idle.set()

        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        for number in range(300):
            queue.add(("ns", str(number % 50)), Stage(number % 3), chance.choice((0.0, 0.01)))
            if number % 10 == 0:
                await asyncio.sleep(0.001)
                idle.clear()
        async with asyncio.timeout(20):
            await idle.wait()
        assert not [task for task in tasks if task.done()], "a worker failed"
        for task in tasks:
            task.cancel()
        return counts

    assert len(asyncio.run(run())) == 50


def test_work_that_is_due_in_a_moment_wakes_a_worker() -> None:
    """uvloop, which the operator runs on, calls such work soon instead of setting a timer."""

    async def run() -> list[Key]:
        queue = WorkQueue()
        queue.add(("ns", "soon"), Stage.STATUS, 0.0003)
        queue.add(("ns", "sooner"), Stage.STATUS, 0.0001)
        queue.add(("ns", "later"), Stage.STATUS, 0.02)
        async with asyncio.timeout(10):
            return [await queue.get() for _ in range(3)]

    assert uvloop.run(run())[-1] == ("ns", "later")
