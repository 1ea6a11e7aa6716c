"""Schedule policies: priorities that age, longest prefix match, bounds on overtaking and on waiting tokens."""

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
from skiff_runtime.scheduler import schedule_policy
from skiff_runtime.scheduler.request import make_queue_key


@dataclass(frozen=True)
class Arrival:
    """A request that arrives in a turn; arrivals of one stem share a prefix."""

    turn: int
    stem: int
    priority: int
    max_tokens: int

    def prompt(self, uid: int) -> list[int]:
        return [self.stem] * 8 + [uid % EOS, uid // EOS]


arrivals = st.builds(
    Arrival,
    turn=st.integers(0, 12),
    stem=st.integers(0, 3),
    priority=st.integers(-2, 2),
    max_tokens=st.integers(1, 6),
)


def run_in_order(bench: SchedulerBench, population: list[Arrival]) -> list[int]:
    """Run all requests; return their uids in the order in which they first ran."""
    for turn in range(13):
        bench.put(
            *(
                generate(uid, each.prompt(uid), max_tokens=each.max_tokens, priority=each.priority)
                for uid, each in enumerate(population)
                if each.turn == turn
            )
        )
        bench.turn()
    bench.finish()
    return list(bench.replies.opened)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    population=st.lists(arrivals, min_size=2, max_size=40),
    slots=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "lpm"]),
    num_pages=st.sampled_from([8, 40]),
)
def test_overtaking_is_bounded(population: list[Arrival], slots: int, policy: str, num_pages: int) -> None:
    """A later request runs earlier only within the bounds of ``make_queue_key`` and ``OVERTAKING_BATCHES``."""
    waiting = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_policy, "OVERTAKING_BATCHES", 1)
        bench = SchedulerBench(
            num_pages=num_pages,
            max_running_requests=slots,
            max_queued_requests=waiting,
            max_num_batched_tokens=8,
            schedule_policy=policy,
        )
    opened = run_in_order(bench, population)
    assert sorted(opened) == list(range(len(population)))
    by_arrival = sorted(range(len(population)), key=lambda uid: (population[uid].turn, uid))
    arrival = {uid: number for number, uid in enumerate(by_arrival)}
    for index, uid in enumerate(opened):
        overtakers = [other for other in opened[:index] if arrival[other] > arrival[uid]]
        levels = {other: population[uid].priority - population[other].priority for other in overtakers}
        aged = [
            other
            for other in overtakers
            if arrival[other] - arrival[uid] >= levels[other] * (slots + waiting) or not levels[other]
        ]
        assert len(aged) <= (slots if policy == "lpm" else 0)


def test_priority_level_is_worth_a_number_of_arrivals() -> None:
    def key(arrival: int, priority: int) -> tuple[int, int]:
        return make_queue_key(arrival=arrival, priority=priority, arrivals_per_level=10)

    assert key(9, -1) < key(0, 0) < key(10, -1) < key(1, 0) < key(0, 1)
    assert key(19, -2) < key(0, 0) < key(20, -2)


def test_lower_priority_value_runs_first() -> None:
    bench = SchedulerBench(max_running_requests=1)
    priorities = [0, 5, -3, 0, -3]
    bench.put(*(generate(uid, [uid], priority=priority) for uid, priority in enumerate(priorities)))
    bench.finish()
    assert list(bench.replies.opened) == [2, 4, 0, 3, 1]


def test_least_urgent_request_is_preempted() -> None:
    bench = SchedulerBench(num_pages=22, page_size=1, max_running_requests=2)
    bench.put(generate(0, [1, 2], max_tokens=12, priority=1), generate(1, [3, 4], max_tokens=12))
    bench.finish()
    assert bench.total("preempted") == 1
    opened = [int(opened.tokens[0]) for plan in bench.engine.plans for opened in plan.opened]
    assert opened == [3, 1, 1]
    assert bench.replies[0].tokens == continuation([1, 2], 12)


def test_lpm_runs_the_longest_cached_prefix_first() -> None:
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


def test_lpm_bounds_overtaking() -> None:
    bench = SchedulerBench(max_running_requests=1, schedule_policy="lpm")
    stem = list(range(8))
    bench.put(generate(0, stem, max_tokens=1))
    bench.finish()
    crowd = range(2, 2 + 2 * schedule_policy.OVERTAKING_BATCHES)
    bench.put(generate(1, [30], max_tokens=1), *(generate(uid, [*stem, 9], max_tokens=1) for uid in crowd))
    bench.finish()
    assert bench.replies.opened.index(1) == 1 + schedule_policy.OVERTAKING_BATCHES


def test_lpm_runs_requests_of_one_prefix_together() -> None:
    """64 requests with 16 interleaved prefixes: the 8 that run at a time have 3 different prefixes, not 8."""
    bench = SchedulerBench(max_running_requests=8, schedule_policy="lpm", max_num_batched_tokens=16)
    bench.put(*(generate(uid, [uid % 16] * 8 + [20 + uid], max_tokens=3) for uid in range(64)))
    bench.finish()
    assert sorted(bench.replies.opened) == list(range(64))
    stems = [uid % 16 for uid in bench.replies.opened[: 8 * schedule_policy.OVERTAKING_BATCHES]]
    assert all(len(set(stems[first : first + 8])) <= 3 for first in range(0, len(stems), 8)), stems


def record_lookups(bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the result of each lookup in the prefix cache from now on."""
    lookups: list[int] = []
    cache = bench.scheduler._pool.cache
    count_cached_pages = cache.count_cached_pages

    def count_and_record(tokens: np.ndarray, *, salt: bytes = b"") -> int:
        lookups.append(count_cached_pages(tokens, salt=salt))
        return lookups[-1]

    monkeypatch.setattr(cache, "count_cached_pages", count_and_record)
    return lookups


def test_prefixes_are_looked_up_again_only_after_the_cache_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is always free, but there is no memory for another request."""
    bench = SchedulerBench(max_running_requests=2, num_pages=5, schedule_policy="lpm")
    lookups = record_lookups(bench, monkeypatch)
    bench.put(generate(0, range(8), max_tokens=9), generate(1, [1] * 12), generate(2, [2] * 12))
    seen = []
    for _ in range(8):
        bench.turn()
        seen.append((bench.scheduler._pool.cache.version, len(lookups)))
    alike = [one == other for one, other in pairwise(seen[1:]) if one[0] == other[0]]
    assert seen[0][1] > 0 and len(alike) > 3 and all(alike), seen


def test_lookups_are_bounded_by_the_tokens_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds however many requests wait and however often the cache changes; all of them run."""
    bench = SchedulerBench(
        max_running_requests=4, schedule_policy="lpm", max_num_batched_tokens=32, max_queued_requests=999
    )
    lookups = record_lookups(bench, monkeypatch)
    waiting = 3 * schedule_policy.MIN_LOOKUPS_PER_STEP
    bench.put(*(generate(uid, [uid % 10, uid // 10, *range(6)], max_tokens=1) for uid in range(waiting)))
    bench.turn()
    assert len(lookups) == waiting, "before the first step there is nothing to delay"
    counts = []
    for _ in range(12):
        before = len(lookups)
        bench.turn()
        counts.append(len(lookups) - before)
    assert 0 < max(counts) <= schedule_policy.MIN_LOOKUPS_PER_STEP + 32 // schedule_policy.TOKENS_PER_LOOKUP
    bench.finish()
    assert len(bench.replies.opened) == waiting


def test_lookup_does_not_split_nodes() -> None:
    bench = SchedulerBench(max_running_requests=1, num_pages=12, schedule_policy="lpm")
    cache = bench.scheduler._pool.cache
    bench.put(generate(0, range(16)))
    bench.finish()
    prefix = np.arange(16, dtype=np.int32)
    counts = [cache.count_cached_pages(each) for each in (prefix, prefix[:7], prefix[1:])]
    assert counts == [4, 1, 0]
    root = cache._root  # type: ignore[attr-defined]
    [child] = root.children.values()
    assert len(child.pages) >= 4, "nothing was split"


def refused(bench: SchedulerBench) -> dict[int, str]:
    return {uid: reply.failed.message for uid, reply in bench.replies.items() if reply.failed}


def test_waiting_prompt_tokens_are_bounded() -> None:
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
    bench.put(generate(10, range(100)))  # more than may wait, but the queue is empty
    bench.finish()
    assert bench.replies[10].tokens == continuation(range(100), 4)
    assert bench.stats[-1].queued_tokens == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_are_never_refused(overlap: bool) -> None:
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
def test_request_beyond_the_limits_is_refused_every_time(
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
    assert bench.replies[0].has_ended and bench.replies[1].has_ended
