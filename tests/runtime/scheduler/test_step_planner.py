"""What goes into a step: order, budget, sharing, rewriting, room made by preemption."""

import numpy as np
import pytest
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.step import StepPlan


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """(slot, start, length, samples) of each row."""
    columns = (plan.slots, plan.starts, plan.lengths, plan.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def cells(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, column, page) of each cell that the step sets."""
    columns = (plan.page_slots, plan.page_columns, plan.page_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_decode_rows_come_first_and_chunks_fill_the_budget() -> None:
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


def test_the_longest_contexts_come_first_among_decode_rows() -> None:
    bench = SchedulerBench()
    bench.put(*(generate(uid, range(length), max_tokens=9) for uid, length in enumerate((3, 9, 1, 9, 5))))
    for _ in range(4):
        bench.turn()
    last = rows(bench.engine.plans[-1])
    assert [slot for slot, *_ in last] == [1, 3, 4, 0, 2]
    assert [start for _, start, *_ in last] == sorted((start for _, start, *_ in last), reverse=True)


def test_prompts_take_smaller_chunks_beside_decode_rows() -> None:
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


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
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
def test_a_prompt_cached_whole_computes_its_last_page_and_then_reads_the_cached_one(overlap: bool) -> None:
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
def test_a_duplicate_page_is_nobody_elses_while_its_step_writes_it(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    prompt, other = list(range(8)), list(range(20, 29))
    bench.put(generate(0, prompt))
    bench.finish()
    bench.put(generate(1, prompt), generate(2, other))
    bench.finish()
    assert bench.replies[1].tokens == continuation(prompt, 4)
    assert bench.replies[2].tokens == continuation(other, 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rewrite_that_is_due_spares_the_next_request_in_the_slot(overlap: bool) -> None:
    bench = SchedulerBench(max_running_requests=1, disable_overlap_schedule=not overlap)
    prompt, other = list(range(8)), list(range(20, 29))
    bench.put(generate(0, prompt), generate(1, prompt, max_tokens=1), generate(2, other))
    bench.finish()
    assert bench.replies[2].tokens == continuation(other, 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rewrite_that_is_due_spares_who_comes_back_at_once(overlap: bool) -> None:
    """Request 4 finds its last page cached, is preempted in the next plan, loses that page to others, and goes on
    before request 3, which was preempted with it, because more of its prompt is cached."""
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
    comeback = next(plan for plan in bench.engine.plans if plan.opened and len(plan.opened[0].tokens) == 17)
    assert rows(comeback)[-1] == (comeback.opened[0].slot, 12, 1, False)
    assert bench.replies[4].tokens == continuation(prompt, 2)
    for uid, each in prompts.items():
        assert bench.replies[uid].tokens == continuation(each, 6)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_youngest_is_retracted_and_comes_back_first(overlap: bool) -> None:
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


def test_tokens_of_the_retracted_outlive_their_slots() -> None:
    """Two wait at a time; the older comes back into the slot that the younger left."""
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


def test_a_chunk_takes_only_the_memory_there_is() -> None:
    bench = SchedulerBench(num_pages=8, page_size=2, disable_radix_cache=True, max_running_requests=2)
    bench.put(generate(0, [1], max_tokens=3), generate(1, range(9), max_tokens=7))
    bench.finish()
    assert bench.replies[0].tokens == continuation([1], 3)
    assert bench.replies[1].tokens == continuation(range(9), 7)


def test_slots_and_budget_bound_the_batch() -> None:
    random = np.random.default_rng(0)
    bench = SchedulerBench(max_running_requests=3, max_num_batched_tokens=5, num_pages=100)
    for uid in range(12):
        bench.put(generate(uid, random.integers(0, EOS, 1 + uid).tolist(), max_tokens=1 + uid % 5))
    bench.finish()
    assert max(plan.tokens for plan in bench.engine.plans) == 5
    assert max(stats.running for stats in bench.stats) == 3
    assert all(reply.ended for reply in bench.replies.values())


def test_the_result_of_a_step_is_awaited_after_the_next_is_launched() -> None:
    """Overlap: when a step's tokens are sent, the engine has its successor already."""
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
