"""Who runs when: priorities that age, cached prefixes first, bounds on what waits, nobody starves."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.messages import AbortRequest
from skiff_runtime.scheduler import schedule_policy as order
from skiff_runtime.scheduler.request import place_of


@dataclass(frozen=True)
class Guest:
    """A request that comes in some turn; guests of one stem share a prefix."""

    turn: int
    stem: int
    priority: int
    max_tokens: int

    def prompt(self, uid: int) -> list[int]:
        return [self.stem] * 8 + [uid % EOS, uid // EOS]


guests = st.builds(
    Guest,
    turn=st.integers(0, 12),
    stem=st.integers(0, 3),
    priority=st.integers(-2, 2),
    max_tokens=st.integers(1, 6),
)


def opened_order(bench: SchedulerBench, population: list[Guest]) -> list[int]:
    """Uids in the order in which they first ran."""
    for turn in range(13):
        bench.put(
            *(
                generate(uid, guest.prompt(uid), max_tokens=guest.max_tokens, priority=guest.priority)
                for uid, guest in enumerate(population)
                if guest.turn == turn
            )
        )
        bench.turn()
    bench.finish()
    return list(bench.replies.opened)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    population=st.lists(guests, min_size=2, max_size=40),
    slots=st.integers(1, 3),
    schedule_policy=st.sampled_from(["fcfs", "lpm"]),
    num_pages=st.sampled_from([8, 40]),
)
def test_nobody_is_overtaken_for_ever(
    population: list[Guest], slots: int, schedule_policy: str, num_pages: int
) -> None:
    """Whoever comes later runs earlier only within the bounds that ``place_of`` and ``OVERTAKING_BATCHES`` state."""
    waiting = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "OVERTAKING_BATCHES", 1)
        bench = SchedulerBench(
            num_pages=num_pages,
            max_running_requests=slots,
            max_queued_requests=waiting,
            max_num_batched_tokens=8,
            schedule_policy=schedule_policy,
        )
    opened = opened_order(bench, population)
    assert sorted(opened) == list(range(len(population)))
    arrivals = sorted(range(len(population)), key=lambda uid: (population[uid].turn, uid))
    arrival = {uid: number for number, uid in enumerate(arrivals)}
    for index, uid in enumerate(opened):
        passers = [other for other in opened[:index] if arrival[other] > arrival[uid]]
        levels = {other: population[uid].priority - population[other].priority for other in passers}
        aged = [
            other
            for other in passers
            if arrival[other] - arrival[uid] >= levels[other] * (slots + waiting) or not levels[other]
        ]
        assert len(aged) <= (slots if schedule_policy == "lpm" else 0)


def test_a_level_is_worth_so_many_arrivals() -> None:
    def place(arrival: int, priority: int) -> tuple[int, int]:
        return place_of(arrival=arrival, priority=priority, arrivals_per_level=10)

    assert place(9, -1) < place(0, 0) < place(10, -1) < place(1, 0) < place(0, 1)
    assert place(19, -2) < place(0, 0) < place(20, -2)


def test_priority_goes_first_and_outlives_retraction() -> None:
    bench = SchedulerBench(max_running_requests=1)
    priorities = [0, 5, -3, 0, -3]
    bench.put(*(generate(uid, [uid], priority=priority) for uid, priority in enumerate(priorities)))
    bench.finish()
    assert list(bench.replies.opened) == [2, 4, 0, 3, 1]


def test_the_least_urgent_is_retracted() -> None:
    bench = SchedulerBench(num_pages=22, page_size=1, max_running_requests=2)
    bench.put(generate(0, [1, 2], max_tokens=12, priority=1), generate(1, [3, 4], max_tokens=12))
    bench.finish()
    assert bench.total("preempted") == 1
    opened = [int(opened.tokens[0]) for plan in bench.engine.plans for opened in plan.opened]
    assert opened == [3, 1, 1]
    assert bench.replies[0].tokens == continuation([1, 2], 12)


def test_the_longest_cached_prefix_goes_first() -> None:
    bench = SchedulerBench(max_running_requests=1, schedule_policy="lpm")
    stem = list(range(16))
    bench.put(generate(0, stem))
    bench.finish()
    bench.put(
        generate(1, [30, 31]),
        generate(2, [*stem[:8], 33]),
        generate(3, [*stem, 34]),
        generate(4, [*stem, 35], priority=1),
        generate(5, [36], priority=-1),
    )
    bench.finish()
    assert list(bench.replies.opened) == [0, 5, 3, 2, 1, 4]


def test_longer_prefixes_pass_only_so_often() -> None:
    bench = SchedulerBench(max_running_requests=1, schedule_policy="lpm")
    stem = list(range(8))
    bench.put(generate(0, stem, max_tokens=1))
    bench.finish()
    crowd = range(2, 2 + 2 * order.OVERTAKING_BATCHES)
    bench.put(generate(1, [30], max_tokens=1), *(generate(uid, [*stem, 9], max_tokens=1) for uid in crowd))
    bench.finish()
    assert bench.replies.opened.index(1) == 1 + order.OVERTAKING_BATCHES


def test_those_of_one_prefix_run_together_however_they_are_mixed() -> None:
    """Of 64 requests with 16 prefixes in turn, 8 may run at a time, and have 3 of the prefixes, not 8."""
    bench = SchedulerBench(max_running_requests=8, schedule_policy="lpm", max_num_batched_tokens=16)
    bench.put(*(generate(uid, [uid % 16] * 8 + [20 + uid], max_tokens=3) for uid in range(64)))
    bench.finish()
    assert sorted(bench.replies.opened) == list(range(64))
    stems = [uid % 16 for uid in bench.replies.opened[: 8 * order.OVERTAKING_BATCHES]]
    assert all(len(set(stems[first : first + 8])) <= 3 for first in range(0, len(stems), 8)), stems


def looks_of(bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each look at the cache finds, from now on."""
    looks: list[int] = []
    cache = bench.scheduler._memory.cache
    depth = cache.depth

    def noted(tokens: np.ndarray, *, salt: bytes = b"") -> int:
        looks.append(depth(tokens, salt=salt))
        return looks[-1]

    monkeypatch.setattr(cache, "depth", noted)
    return looks


def test_what_is_cached_is_looked_up_again_only_after_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is free all the time, but there is no memory for another request."""
    bench = SchedulerBench(max_running_requests=2, num_pages=5, schedule_policy="lpm")
    looks = looks_of(bench, monkeypatch)
    bench.put(generate(0, range(8), max_tokens=9), generate(1, [1] * 12), generate(2, [2] * 12))
    seen = []
    for _ in range(8):
        bench.turn()
        seen.append((bench.scheduler._memory.cache.changes, len(looks)))
    alike = [one == other for one, other in pairwise(seen[1:]) if one[0] == other[0]]
    assert seen[0][1] > 0 and len(alike) > 3 and all(alike), seen


def test_looks_are_bounded_by_the_work_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, and however often the cache changes; and all have their turn."""
    bench = SchedulerBench(
        max_running_requests=4, schedule_policy="lpm", max_num_batched_tokens=32, max_queued_requests=999
    )
    looks = looks_of(bench, monkeypatch)
    waiting = 3 * order.MIN_LOOKUPS_PER_STEP
    bench.put(*(generate(uid, [uid % 10, uid // 10, *range(6)], max_tokens=1) for uid in range(waiting)))
    bench.turn()
    assert len(looks) == waiting, "before the first step nobody is held up"
    counts = []
    for _ in range(12):
        before = len(looks)
        bench.turn()
        counts.append(len(looks) - before)
    assert 0 < max(counts) <= order.MIN_LOOKUPS_PER_STEP + 32 // order.TOKENS_PER_LOOKUP
    bench.finish()
    assert len(bench.replies.opened) == waiting


def test_a_look_at_a_prefix_is_no_use_of_it() -> None:
    bench = SchedulerBench(max_running_requests=1, num_pages=12, schedule_policy="lpm")
    cache = bench.scheduler._memory.cache
    bench.put(generate(0, range(16)))
    bench.finish()
    prefix = np.arange(16, dtype=np.int32)
    before = (cache.depth(prefix), cache.depth(prefix[:7]), cache.depth(prefix[1:]))
    assert before == (4, 1, 0)
    root = cache._root  # type: ignore[attr-defined]
    [child] = root.children.values()
    assert len(child.pages) >= 4, "nothing was split"


def refused(bench: SchedulerBench) -> dict[int, str]:
    return {uid: reply.failed.message for uid, reply in bench.replies.items() if reply.failed}


def test_tokens_that_wait_are_bounded() -> None:
    bench = SchedulerBench(max_running_requests=1, max_queued_tokens=20)
    bench.put(*(generate(uid, [uid] * 8) for uid in range(4)), generate(9, range(100)))
    bench.turn()
    assert list(refused(bench)) == [2, 3, 9]
    assert refused(bench)[2] == (
        "2 requests with 16 prompt tokens wait already, and this prompt has 8; "
        "at most 20 may wait (--max-queued-tokens); retry shortly"
    )
    failed = bench.replies[2].failed
    assert failed is not None
    assert (failed.status, failed.kind, failed.code) == (429, "rate_limit_error", "queue_full")
    assert bench.stats[-1].queued_tokens == 8
    bench.put(AbortRequest(1))
    bench.turn()
    bench.put(generate(10, range(100)))  # more than may wait, but nobody else waits
    bench.finish()
    assert bench.replies[10].tokens == continuation(range(100), 4)
    assert bench.stats[-1].queued_tokens == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_retracted_are_never_refused(overlap: bool) -> None:
    bench = SchedulerBench(
        num_pages=22,
        page_size=1,
        max_running_requests=2,
        max_queued_tokens=2,
        disable_overlap_schedule=not overlap,
    )
    for uid in range(2):
        bench.put(generate(uid, [uid, 7], max_tokens=12))
        bench.turn()
    bench.finish()
    assert bench.total("preempted") > 0
    for uid in range(2):
        assert bench.replies[uid].tokens == continuation([uid, 7], 12)


def options(**changes: Any) -> dict[str, Any]:
    return {"num_pages": 5, "page_size": 4, "max_model_len": 64, **changes}


@pytest.mark.parametrize(
    ("limits", "prompt", "max_tokens", "fits"),
    [
        (options(), 16, 4, True),
        (options(), 16, 5, False),
        (options(), 19, 0, True),
        (options(), 20, 0, False),
        (options(num_pages=100), 63, 1, True),
        (options(num_pages=100), 64, 1, False),
        (options(num_pages=100), 1, 63, True),
        (options(num_pages=100), 1, 64, False),
        (options(max_num_batched_tokens=1, max_running_requests=1), 16, 4, True),
        (options(max_queued_tokens=1), 16, 4, True),
    ],
)
def test_what_fits_no_limit_is_refused_at_once_each_copy(
    limits: dict[str, Any], prompt: int, max_tokens: int, fits: bool
) -> None:
    bench = SchedulerBench(**limits)
    bench.put(generate(0, [3] * prompt, max_tokens=max_tokens))
    bench.turn()
    bench.put(generate(1, [3] * prompt, max_tokens=max_tokens))
    bench.turn()
    assert sorted(refused(bench)) == ([] if fits else [0, 1])
    for message in refused(bench).values():
        assert f"the prompt has {prompt} tokens" in message
    bench.finish()
    assert bench.replies[0].ended and bench.replies[1].ended
