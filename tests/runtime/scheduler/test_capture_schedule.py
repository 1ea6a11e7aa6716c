"""Captures of CUDA graphs that the scheduler plans: while idle one by one, between steps now and then, alike on all ranks."""

import pytest
from scheduler_bench import SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.messages import Shutdown
from skiff_runtime.scheduler.capture_schedule import CAPTURE_INTERVAL_STEPS, CaptureSchedule


def test_idle_scheduler_captures_one_graph_a_turn_and_then_waits() -> None:
    bench = SchedulerBench(num_deferred_graphs=3)
    for _ in range(6):
        bench.turn()
    assert [(len(plan.slots), plan.captures_graph) for plan in bench.engine.plans] == [(0, True)] * 3
    assert bench.channel.waits == [False] * 3 + [True] * 3
    assert [stats.graphs_pending for stats in bench.stats] == [2, 1, 0]
    assert bench.scheduler.is_idle


def test_request_that_arrives_waits_for_one_capture_at_most() -> None:
    bench = SchedulerBench(num_deferred_graphs=9)
    bench.turn()
    bench.put(generate(1, [1, 2, 3], max_tokens=4))
    bench.turn()
    assert [len(plan.slots) for plan in bench.engine.plans] == [0, 1]
    bench.finish()
    assert bench.replies[1].tokens == continuation([1, 2, 3], 4)


def test_running_requests_are_delayed_by_few_captures() -> None:
    bench = SchedulerBench(num_deferred_graphs=3)
    count = 5 * CAPTURE_INTERVAL_STEPS
    bench.put(generate(1, [1, 2, 3], max_tokens=count))
    bench.finish()
    assert bench.replies[1].tokens == continuation([1, 2, 3], count)
    carrying = [at for at, plan in enumerate(bench.engine.plans, 1) if plan.captures_graph]
    assert carrying == [CAPTURE_INTERVAL_STEPS * at for at in (1, 2, 3)]
    assert all(len(plan.slots) for plan in bench.engine.plans[:count])
    assert bench.stats[0].graphs_pending == 3
    assert bench.stats[-1].graphs_pending == 0


def test_without_deferred_graphs_no_plan_captures_one() -> None:
    bench = SchedulerBench()
    bench.put(generate(1, [1, 2, 3], max_tokens=2 * CAPTURE_INTERVAL_STEPS))
    bench.finish()
    assert not any(plan.captures_graph for plan in bench.engine.plans)
    bench.turn()
    assert bench.channel.waits[-1]


def test_shutdown_ends_the_captures() -> None:
    bench = SchedulerBench(num_deferred_graphs=9)
    bench.turn()
    bench.channel.arriving.append(Shutdown())
    assert not bench.turn()
    assert len(bench.engine.plans) == 1


@pytest.mark.parametrize("other", [0, 2, 4])
def test_rank_that_captures_at_another_place_is_noticed(other: int) -> None:
    ranks = [SchedulerBench(num_deferred_graphs=graphs) for graphs in (3, 3, other)]
    checksums = []
    for bench in ranks:
        for _ in range(5):
            bench.turn()
        checksums.append(bench.scheduler.checksum)
    assert checksums[0] == checksums[1] != checksums[2]


def test_schedule_counts_down_to_none() -> None:
    schedule = CaptureSchedule(2)
    assert [schedule.take_busy() for _ in range(CAPTURE_INTERVAL_STEPS)] == [
        *[False] * (CAPTURE_INTERVAL_STEPS - 1),
        True,
    ]
    assert schedule.take_idle()
    assert not schedule.take_idle()
    assert schedule.num_pending == 0
