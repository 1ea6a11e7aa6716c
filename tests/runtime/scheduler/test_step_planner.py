"""The step planner: order of rows, token budget, shared prefixes, page-table fixups, preemption."""

import numpy as np
import pytest
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.step import StepPlan


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Return (slot, start, length, samples) of each row."""
    columns = (plan.slots, plan.starts, plan.lengths, plan.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def cells(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (slot, column, page) of each page-table cell that the step sets."""
    columns = (plan.page_slots, plan.page_columns, plan.page_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_decode_rows_come_first_and_prefill_chunks_fill_the_budget() -> None:
    bench = SchedulerBench(max_num_batched_tokens=8, disable_radix_cache=True)
    bench.put(generate(0, range(5), max_tokens=5))
    bench.turn()
    bench.put(generate(1, range(10, 30), max_tokens=2), generate(2, range(3), max_tokens=1))
    for _ in range(4):
        bench.turn()
    assert [rows(plan) for plan in bench.engine.plans] == [
        [(0, 0, 5, True)],
        [(0, 5, 1, True), (1, 0, 7, False)],
        [(0, 6, 1, True), (1, 7, 7, False)],
        [(0, 7, 1, True), (1, 14, 6, True), (2, 0, 1, False)],
        [(1, 20, 1, True), (0, 8, 1, True), (2, 1, 2, True)],
    ]
    assert [plan.decode_rows for plan in bench.engine.plans] == [0, 1, 1, 1, 2]
    bench.finish()
    assert len(bench.engine.plans) == 5, "a request that reaches max_tokens gets no further row"
    assert (bench.total("prefill_tokens"), bench.total("decode_tokens")) == (28, 5)
    assert bench.total("prefill_rows") == 6
    waited = [seconds for stats in bench.stats for seconds in stats.queue_seconds]
    assert len(waited) == 3 and min(waited) >= 0


def test_decode_rows_are_sorted_by_longest_context() -> None:
    bench = SchedulerBench()
    bench.put(*(generate(uid, range(length), max_tokens=9) for uid, length in enumerate((3, 9, 1, 9, 5))))
    for _ in range(4):
        bench.turn()
    last = rows(bench.engine.plans[-1])
    assert [slot for slot, *_ in last] == [1, 3, 4, 0, 2]
    assert [start for _, start, *_ in last] == sorted((start for _, start, *_ in last), reverse=True)


def test_mixed_prefill_tokens_bound_the_chunks_of_mixed_steps() -> None:
    bench = SchedulerBench(max_num_batched_tokens=8, mixed_prefill_tokens=3, disable_radix_cache=True)
    bench.put(generate(0, range(7), max_tokens=3))
    bench.turn()
    bench.put(generate(1, range(10, 20), max_tokens=1))
    for _ in range(3):
        bench.turn()
    assert [rows(plan) for plan in bench.engine.plans] == [
        [(0, 0, 7, True)],
        [(0, 7, 1, True), (1, 0, 3, False)],
        [(0, 8, 1, True), (1, 3, 3, False)],
        [(1, 6, 4, True)],
    ]
    bench.finish()


def test_requests_of_one_step_share_pages_of_a_common_prefix() -> None:
    bench = SchedulerBench()
    stem = list(range(16))
    bench.put(generate(0, [*stem, 20]), generate(1, [*stem, 21, 22]))
    bench.turn()
    (plan,) = bench.engine.plans
    assert rows(plan) == [(0, 0, 17, True), (1, 16, 2, True)]
    pages = {(slot, column): page for slot, column, page in cells(plan)}
    assert [pages[0, column] for column in range(4)] == [pages[1, column] for column in range(4)]
    bench.finish()
    opened = bench.replies[1].opened
    assert opened is not None and (opened.prompt_tokens, opened.cached_tokens) == (18, 16)
    assert bench.replies[1].tokens == continuation([*stem, 21, 22], 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_fully_cached_prompt_recomputes_its_last_page_then_reads_the_cached_one(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    prompt = list(range(8))
    bench.put(generate(0, prompt))
    bench.finish()
    first = {column: page for _, column, page in cells(bench.engine.plans[0])}
    done = len(bench.engine.plans)
    bench.put(generate(1, prompt))
    bench.turn()
    assert bench.scheduler._slots.pages[0, :2].tolist() == [first[0], first[1]]
    bench.finish()
    prefill, decode = bench.engine.plans[done : done + 2]
    assert rows(prefill) == [(0, 4, 4, True)]
    own = {column: page for _, column, page in cells(prefill)}
    assert own[0] == first[0] and own[1] != first[1]
    assert (0, 1, first[1]) in cells(decode)
    assert bench.replies[1].tokens == continuation(prompt, 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_duplicate_page_is_not_reused_while_its_step_writes_it(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    prompt, other = list(range(8)), list(range(20, 29))
    bench.put(generate(0, prompt))
    bench.finish()
    bench.put(generate(1, prompt), generate(2, other))
    bench.finish()
    assert bench.replies[1].tokens == continuation(prompt, 4)
    assert bench.replies[2].tokens == continuation(other, 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_pending_fixup_is_dropped_when_its_slot_has_another_request(overlap: bool) -> None:
    bench = SchedulerBench(max_running_requests=1, disable_overlap_schedule=not overlap)
    prompt, other = list(range(8)), list(range(20, 29))
    bench.put(generate(0, prompt), generate(1, prompt, max_tokens=1), generate(2, other))
    bench.finish()
    assert bench.replies[2].tokens == continuation(other, 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_pending_fixup_is_dropped_when_its_request_is_preempted_and_readmitted(overlap: bool) -> None:
    """Request 4 finds its last page cached, is preempted in the next plan, and loses that page to others. It is
    readmitted before request 3, which was preempted with it, because more of its prompt is cached."""
    bench = SchedulerBench(
        num_pages=11, mixed_prefill_tokens=1, schedule_policy="lpm", disable_overlap_schedule=not overlap
    )
    prompt, stem = list(range(16)), list(range(12))
    bench.put(generate(0, prompt, max_tokens=1))
    bench.finish()
    prompts = {1: [*stem, *range(20, 24)], 2: [30] * 4, 3: [31] * 4}
    bench.put(*(generate(uid, each, max_tokens=6) for uid, each in prompts.items()))
    bench.turn()
    bench.put(generate(4, prompt, max_tokens=2))
    bench.finish()
    assert max(stats.preempted for stats in bench.stats) == 2
    readmitted = next(plan for plan in bench.engine.plans if plan.opened and len(plan.opened[0].tokens) == 17)
    assert rows(readmitted)[-1] == (readmitted.opened[0].slot, 12, 1, False)
    assert bench.replies[4].tokens == continuation(prompt, 2)
    for uid, each in prompts.items():
        assert bench.replies[uid].tokens == continuation(each, 6)


@pytest.mark.parametrize("overlap", [True, False])
def test_youngest_request_is_preempted_and_readmitted_first(overlap: bool) -> None:
    bench = SchedulerBench(
        num_pages=22, page_size=1, max_running_requests=2, disable_overlap_schedule=not overlap
    )
    prompts = [[1, 2], [3, 4], [5, 6]]
    bench.put(*(generate(uid, prompt, max_tokens=12) for uid, prompt in enumerate(prompts)))
    bench.finish()
    assert bench.total("preempted") == 1
    opened = [opened.tokens.tolist() for plan in bench.engine.plans for opened in plan.opened]
    produced = len(opened[2]) - 2
    assert 0 < produced < 12
    assert opened == [[1, 2], [3, 4], [3, 4, *continuation([3, 4], produced)], [5, 6]]
    for uid, prompt in enumerate(prompts):
        assert bench.replies[uid].tokens == continuation(prompt, 12)


def test_preempted_requests_resume_with_identical_tokens_in_other_slots() -> None:
    """Two preempted requests wait at once; the older takes the slot that the younger had."""
    bench = SchedulerBench(num_pages=116, page_size=1, max_running_requests=3, max_model_len=128)
    bench.put(generate(0, [0], max_tokens=110))  # long enough for the estimate to fall below two thirds
    bench.finish()
    lengths = {1: 3, 2: 1, 3: 60, 4: 60, 5: 60}
    bench.put(*(generate(uid, [uid], max_tokens=length) for uid, length in lengths.items()))
    bench.finish()
    opened = [(opened.slot, int(opened.tokens[0])) for plan in bench.engine.plans for opened in plan.opened]
    assert opened == [(0, 0), (0, 1), (1, 2), (2, 3), (1, 4), (0, 5), (0, 4), (0, 5)]
    for uid, length in lengths.items():
        assert bench.replies[uid].tokens == continuation([uid], length)


def test_prefill_chunk_is_cut_to_the_available_pages() -> None:
    bench = SchedulerBench(num_pages=8, page_size=2, disable_radix_cache=True, max_running_requests=2)
    bench.put(generate(0, [1], max_tokens=3), generate(1, range(9), max_tokens=7))
    bench.finish()
    assert bench.replies[0].tokens == continuation([1], 3)
    assert bench.replies[1].tokens == continuation(range(9), 7)


def test_batch_is_bounded_by_slots_and_token_budget() -> None:
    random = np.random.default_rng(0)
    bench = SchedulerBench(max_running_requests=3, max_num_batched_tokens=5, num_pages=100)
    for uid in range(12):
        bench.put(generate(uid, random.integers(0, EOS, 1 + uid).tolist(), max_tokens=1 + uid % 5))
    bench.finish()
    assert max(plan.num_tokens for plan in bench.engine.plans) == 5
    assert max(stats.running for stats in bench.stats) == 3
    assert all(reply.has_ended for reply in bench.replies.values())


def test_overlap_awaits_a_step_after_launching_the_next() -> None:
    """When a step's tokens are sent, the engine has the next step already."""
    ahead, behind = SchedulerBench(), SchedulerBench(disable_overlap_schedule=True)
    for bench in (ahead, behind):
        bench.put(generate(0, [1, 2, 3]))
        bench.turn()
    assert ahead.replies[0].tokens == []
    assert len(behind.replies[0].tokens) == 1
    for bench in (ahead, behind):
        bench.finish()
    assert ahead.replies == behind.replies
    assert [rows(plan) for plan in ahead.engine.plans] == [rows(plan) for plan in behind.engine.plans]
