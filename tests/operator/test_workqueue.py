"""The queue's promises: one entry per key, one worker per key, nothing lost, urgent stages first, backing off."""

import asyncio
import itertools
import random
from dataclasses import dataclass

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skiff_operator.kinds import Stage
from skiff_operator.workqueue import LAST_RETRY_SECONDS, STAGE_DEADLINE_SECONDS, Key, Schedule, WorkQueue

ALL_KEYS: tuple[Key, ...] = tuple(("ns", name) for name in "abcde")
KEYS = st.sampled_from(ALL_KEYS)
STAGES = st.sampled_from(list(Stage))


@dataclass
class Backoff:
    """The model's record of a key that failed."""

    failures: int
    retry_at: float


class Histories(RuleBasedStateMachine):
    """Any order of events, resyncs, taking, finishing and failing, at any pace, against a plain model.

    `due` holds the time of each key that waits, and `again` of each that was asked for while it ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.now = 0.0
        self.due: dict[Key, float] = {}
        self.again: dict[Key, float] = {}
        self.running: set[Key] = set()
        self.backoffs: dict[Key, Backoff] = {}

    def expect(self, key: Key, due: float) -> None:
        """The earlier time counts."""
        waiting = self.again if key in self.running else self.due
        waiting[key] = min(due, waiting.get(key, due))

    @rule(key=KEYS, stage=STAGES, delay=st.floats(0, 100))
    def add(self, key: Key, stage: Stage, delay: float) -> None:
        self.schedule.add(key, stage, self.now, delay)
        self.expect(key, self.now + delay)

    @rule()
    def resync(self) -> None:
        """A resync shortens no backoff and repeats no work that is under way."""
        for key in ALL_KEYS:
            self.schedule.refresh(key, Stage.STATUS, self.now)
            if key not in self.running and key not in self.backoffs:
                self.expect(key, self.now)

    @rule(key=KEYS)
    def edit(self, key: Key) -> None:
        """A new spec is tried at once, and its failures are counted from the first."""
        self.schedule.forget(key)
        self.schedule.add(key, Stage.CHILDREN, self.now)
        self.backoffs.pop(key, None)
        self.expect(key, self.now)

    @rule()
    def take(self) -> None:
        key = self.schedule.take(self.now)
        if key is None:
            assert not [due for due in self.due.values() if due <= self.now], (
                "a key that is due was kept back"
            )
            return
        assert key not in self.running, "two workers on one key"
        assert self.due.pop(key) <= self.now, "a key came before its time"
        self.running.add(key)

    @precondition(lambda self: self.running)
    @rule(result=st.sampled_from(["done", "failed", "partial"]), choice=st.randoms(use_true_random=False))
    def finish(self, result: str, choice: random.Random) -> None:
        """Work that was done in part goes on at once, and says nothing of the part that failed before."""
        key = choice.choice(sorted(self.running))
        if result == "partial":
            self.add(key, Stage.NETWORK, 0.0)
        self.schedule.finish(key, self.now, failed=result == "failed", partial=result == "partial")
        self.running.discard(key)
        asked = self.again.pop(key, None)
        if asked is not None:
            self.expect(key, asked)
        if result == "done":
            self.backoffs.pop(key, None)
        if result != "failed":
            return
        backoff = self.backoffs.setdefault(key, Backoff(0, self.now))
        if self.now >= backoff.retry_at:
            backoff.retry_at = self.now + min(2.0**backoff.failures, LAST_RETRY_SECONDS)
            backoff.failures += 1
        self.expect(key, backoff.retry_at)

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_entry_per_key(self) -> None:
        assert len(self.schedule) == len(self.due)

    def teardown(self) -> None:
        """Whatever happened, every key that was asked for is processed in the end."""
        for key in sorted(self.running):
            self.schedule.finish(key, self.now)
        self.now += LAST_RETRY_SECONDS + 200
        seen = set()
        while (due := self.schedule.take(self.now)) is not None:
            seen.add(due)
            self.schedule.finish(due, self.now)
        assert seen == set(self.due) | set(self.again)


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
    patience = STAGE_DEADLINE_SECONDS[Stage.STATUS]
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


@given(resync=st.floats(0.1, 40), tries=st.integers(1, 12))
def test_retries_back_off_from_a_second_to_five_minutes_whatever_resyncs_do(
    resync: float, tries: int
) -> None:
    schedule, key, now, next_resync = Schedule(), ("ns", "a"), 0.0, 0.0
    schedule.add(key, Stage.CHILDREN, now)
    found: list[float] = []
    while len(found) < tries:
        if schedule.take(now) == key:
            found.append(now)
            schedule.finish(key, now, failed=True)
        if now >= next_resync:
            schedule.refresh(key, Stage.STATUS, now)
            next_resync = now + resync
        due = schedule.next_due()
        assert due is not None
        now = max(now, min(due, next_resync))
    waits = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert waits == [min(2.0**count, LAST_RETRY_SECONDS) for count in range(tries - 1)]


def failing(tries: int) -> tuple[Schedule, Key, float]:
    """A schedule whose only key has failed so often, and the time of the last failure."""
    schedule, key, now = Schedule(), ("ns", "a"), 0.0
    schedule.add(key, Stage.CHILDREN, now)
    for _ in range(tries):
        now = max(now, schedule.next_due() or 0.0)
        assert schedule.take(now) == key
        schedule.finish(key, now, failed=True)
    return schedule, key, now


def test_an_event_is_acted_on_at_once_and_once_while_a_key_backs_off() -> None:
    schedule, key, now = failing(5)
    retry_at = now + 16.0
    for early in (now + 1.0, now + 2.0):
        schedule.add(key, Stage.STATUS, early)
        assert schedule.take(early) == key
        schedule.finish(key, early, failed=True)
        assert schedule.take(retry_at - 0.1) is None
    assert schedule.take(retry_at) == key, "early tries leave the backoff as it was"
    schedule.finish(key, retry_at, failed=True)
    assert schedule.take(retry_at + 31.9) is None
    assert schedule.take(retry_at + 32.0) == key


def test_events_wait_for_the_pause_that_the_api_server_demands() -> None:
    schedule, key, now = failing(1)
    schedule.add(key, Stage.CHILDREN, now)
    assert schedule.take(now) == key
    schedule.add(key, Stage.CHILDREN, now)
    schedule.finish(key, now, failed=True, retry_after_seconds=7.0)
    schedule.add(key, Stage.CHILDREN, now + 1.0)
    assert schedule.take(now + 6.9) is None
    assert schedule.take(now + 7.0) == key


def test_a_pause_that_the_api_server_demands_has_a_limit() -> None:
    schedule, key, now = failing(1)
    schedule.add(key, Stage.CHILDREN, now)
    assert schedule.take(now) == key
    schedule.finish(key, now, failed=True, retry_after_seconds=1e9)
    assert schedule.take(now + LAST_RETRY_SECONDS) == key


def test_a_success_in_part_does_not_end_the_backoff() -> None:
    schedule, key, now = failing(9)
    schedule.add(key, Stage.CHILDREN, now)
    assert schedule.take(now) == key
    schedule.add(key, Stage.NETWORK, now)
    schedule.finish(key, now, partial=True)
    assert schedule.take(now) == key
    schedule.finish(key, now, failed=True)
    assert schedule.take(now + 255.0) is None


@pytest.mark.parametrize("edited", [True, False])
def test_success_and_a_new_spec_end_the_backoff(edited: bool) -> None:
    schedule, key, now = failing(9)
    if edited:
        schedule.forget(key)
    schedule.add(key, Stage.CHILDREN, now + 1)
    assert schedule.take(now + 1) == key
    schedule.finish(key, now + 1, failed=edited)
    if not edited:
        schedule.add(key, Stage.CHILDREN, now + 1)
        assert schedule.take(now + 1) == key
        schedule.finish(key, now + 1, failed=True)
    assert schedule.take(now + 1.9) is None
    assert schedule.take(now + 2.0) == key


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
