"""LoRA adapters in the scheduler: slots, host copies, requests that wait for them, and their prefixes."""

import pytest
from scheduler_bench import SchedulerBench, generate, load
from simulated_engine import continuation

from skiff_runtime.messages import (
    AbortRequest,
    AdapterLoaded,
    AdapterRefused,
    FinishReason,
    UnloadAdapter,
    WatchCache,
)
from skiff_runtime.step import LoraLoad

PROMPT = list(range(9))


def make_bench(*adapters: int, **options: object) -> SchedulerBench:
    """Make a bench with these adapters loaded."""
    bench = SchedulerBench(**{"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, **options})  # type: ignore[arg-type]
    bench.put(*map(load, adapters))
    for _ in range(3):
        bench.turn()
    assert bench.replies.adapters == [AdapterLoaded(-each, each) for each in adapters]
    return bench


def loads(bench: SchedulerBench) -> list[LoraLoad]:
    return [each for plan in bench.engine.plans for each in plan.lora_loads]


def run_alone(bench: SchedulerBench, uid: int, adapter_id: int) -> None:
    bench.put(generate(uid, PROMPT, adapter_id=adapter_id))
    bench.finish()
    assert bench.replies[uid].tokens == continuation(PROMPT, 4, adapter_id)


def test_adapters_and_base_share_a_step() -> None:
    bench = make_bench(1, 2)
    bench.put(*(generate(uid, PROMPT, adapter_id=uid % 3) for uid in range(6)))
    bench.finish()
    for uid in range(6):
        assert bench.replies[uid].tokens == continuation(PROMPT, 4, uid % 3)
    assert loads(bench) == [LoraLoad(0, 1), LoraLoad(1, 2)]
    assert max(len(plan.slots) for plan in bench.engine.plans) == 6


def test_least_recently_used_adapter_is_replaced() -> None:
    bench = make_bench(1, 2, 3)
    for uid, adapter_id in enumerate([1, 2, 1, 3, 1]):
        run_alone(bench, uid, adapter_id)
    assert loads(bench) == [LoraLoad(0, 1), LoraLoad(1, 2), LoraLoad(1, 3)]
    assert bench.total("adapter_loads") == 3 and bench.total("adapter_evictions") == 1
    assert bench.stats[-1].resident_adapters == [1, 3]


def test_prefix_is_shared_within_an_adapter_only() -> None:
    bench = make_bench(1, 2)
    for uid, adapter_id in enumerate([0, 1, 2, 0, 1, 2]):
        run_alone(bench, uid, adapter_id)
    opened = [bench.replies[uid].opened for uid in range(6)]
    assert [each.cached_tokens for each in opened if each] == [0, 0, 0, 8, 8, 8]


def test_unload_frees_the_cached_prefixes_of_the_adapter_alone() -> None:
    bench = make_bench(1, 2)
    bench.put(WatchCache(prompts=False, blocks=True))
    for uid, adapter_id in enumerate([0, 1, 2]):
        run_alone(bench, uid, adapter_id)
    assert bench.stats[-1].pages_cached == 9
    bench.put(UnloadAdapter(1))
    bench.finish()
    assert bench.stats[-1].pages_cached == 6
    for uid, adapter_id, cached in ((3, 0, 8), (4, 2, 8)):
        run_alone(bench, uid, adapter_id)
        opened = bench.replies[uid].opened
        assert opened is not None and opened.cached_tokens == cached


def test_name_that_is_used_again_shares_nothing_with_the_adapter_before() -> None:
    bench = make_bench(1)
    run_alone(bench, 0, 1)
    bench.put(UnloadAdapter(1), load(2, name="adapter-1"))
    run_alone(bench, 1, 2)
    opened = bench.replies[1].opened
    assert opened is not None and opened.cached_tokens == 0


def test_request_without_a_slot_waits_and_others_pass_it() -> None:
    bench = make_bench(1, 2, 3)
    bench.put(
        generate(1, PROMPT, adapter_id=1, max_tokens=30), generate(2, PROMPT, adapter_id=2, max_tokens=12)
    )
    bench.turn()
    bench.put(generate(3, PROMPT, adapter_id=3), generate(4, PROMPT), generate(5, PROMPT, adapter_id=1))
    for _ in range(3):
        bench.turn()
    assert bench.replies.opened == [1, 2, 4, 5]
    stats = bench.stats[-1]
    assert (stats.running_adapters, stats.waiting_adapters, stats.queued) == ([1, 2], [3], 1)
    bench.finish()
    assert bench.replies.opened == [1, 2, 4, 5, 3]
    assert bench.replies[3].tokens == continuation(PROMPT, 4, 3)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_request_is_overtaken_a_bounded_number_of_times(policy: str) -> None:
    bench = make_bench(
        1,
        2,
        max_loras=1,
        max_running_requests=2,
        num_pages=256,
        schedule_policy=policy,
        max_queued_requests=1000,
    )
    bench.put(generate(0, PROMPT, adapter_id=1, max_tokens=3))
    bench.turn()
    bench.put(generate(1, [30, 31], adapter_id=2))
    for uid in range(2, 100):  # two of them run at any time, so the slot is never free
        bench.put(generate(uid, PROMPT, adapter_id=1, max_tokens=6))
        bench.turn()
        bench.turn()
    bench.finish()
    overtook = bench.replies.opened.index(1) - 1
    assert 4 * 2 <= overtook <= 4 * 2 + 2
    assert all(bench.replies[uid].finish == FinishReason.LENGTH for uid in range(100))


def test_abort_of_a_request_that_is_due_lets_those_behind_it_start() -> None:
    bench = make_bench(1, 2, 3, max_loras=1, max_running_requests=1)
    bench.put(generate(0, PROMPT, adapter_id=1, max_tokens=40))
    bench.turn()
    bench.put(generate(1, PROMPT, adapter_id=2), generate(2, PROMPT, adapter_id=1, priority=0))
    bench.turn()
    [held] = [each for each in bench.scheduler._queue.held_back if each.uid == 1]
    held.times_overtaken = 4
    bench.scheduler._adapters._due_is_stale = True
    bench.put(AbortRequest(1))
    bench.finish()
    assert bench.replies[2].tokens == continuation(PROMPT, 4, 1)


def test_a_request_that_is_due_delays_nobody_while_its_adapter_is_read() -> None:
    bench = make_bench(1, 2, 3, max_loras=1, max_cpu_loras=2)
    bench.store.turns = 30
    bench.put(generate(0, PROMPT, adapter_id=1))
    bench.turn()
    [held] = bench.scheduler._queue.held_back
    held.times_overtaken = 10_000
    bench.scheduler._adapters._due_is_stale = True
    bench.put(generate(1, PROMPT, adapter_id=3))
    for _ in range(15):
        bench.turn()
    assert bench.replies[1].finish == FinishReason.LENGTH and bench.replies.opened == [1]
    bench.finish()
    assert bench.replies[0].tokens == continuation(PROMPT, 4, 1)


def test_adapters_beyond_host_memory_are_read_again() -> None:
    bench = make_bench(1, 2, 3, max_loras=1, max_cpu_loras=2)
    assert bench.store.reads == [1, 2, 3]
    run_alone(bench, 0, 3)
    run_alone(bench, 1, 1)
    run_alone(bench, 2, 2)
    assert bench.store.reads == [1, 2, 3, 1, 2]
    assert bench.total("adapter_reads") == 5


def test_reading_delays_nobody_and_the_scheduler_sleeps_meanwhile() -> None:
    bench = make_bench(1, 2, max_loras=1, max_cpu_loras=1)
    bench.store.turns = 30
    bench.put(generate(0, PROMPT, adapter_id=1), generate(1, PROMPT))
    for _ in range(15):
        bench.turn()
    assert bench.replies[1].finish == FinishReason.LENGTH and bench.replies.opened == [1]
    assert bench.channel.waits[-1]
    bench.finish()
    assert bench.replies[0].tokens == continuation(PROMPT, 4, 1)


def test_bad_adapter_is_refused_and_can_be_loaded_once_it_is_repaired() -> None:
    bench = make_bench(1)
    bench.store.faulty.add(2)
    bench.put(load(2))
    bench.finish()
    assert bench.replies.adapters[1:] == [AdapterRefused(-2, 2, "no such file")]
    bench.put(UnloadAdapter(2), load(3, name="adapter-2"))
    bench.finish()
    run_alone(bench, 0, 3)


def test_adapter_that_cannot_be_read_again_fails_its_requests_alone() -> None:
    bench = make_bench(1, 2, max_loras=1, max_cpu_loras=1)
    bench.store.faulty.add(1)
    bench.put(generate(0, PROMPT, adapter_id=1), generate(1, PROMPT, adapter_id=2))
    bench.finish()
    failed = bench.replies[0].failed
    assert failed is not None and failed.status == 500 and "no such file" in failed.message
    assert bench.replies[1].tokens == continuation(PROMPT, 4, 2)
    bench.store.faulty.clear()
    run_alone(bench, 2, 1)


def test_unload_lets_requests_finish_and_refuses_new_ones() -> None:
    bench = make_bench(1)
    bench.put(generate(0, PROMPT, adapter_id=1, max_tokens=20))
    bench.turn()
    bench.put(UnloadAdapter(1), generate(1, PROMPT, adapter_id=1))
    bench.finish()
    assert bench.replies[0].tokens == continuation(PROMPT, 20, 1)
    failed = bench.replies[1].failed
    assert failed is not None and failed.status == 404
    assert not bench.engine.registered and bench.stats[-1].resident_adapters == []


def test_host_copy_stays_until_the_step_that_loads_it_has_run() -> None:
    bench = make_bench(1, 2, max_loras=2, max_cpu_loras=2)
    bench.put(load(3), generate(0, PROMPT, adapter_id=2))
    bench.turn()
    assert bench.store.reads == [1, 2, 3]  # in place of 1, which no request uses
    bench.put(generate(1, PROMPT, adapter_id=1))
    bench.finish()
    assert bench.replies[0].tokens == continuation(PROMPT, 4, 2)
    assert bench.replies[1].tokens == continuation(PROMPT, 4, 1)


def test_host_copy_of_a_running_adapter_makes_no_room() -> None:
    bench = make_bench(1, max_loras=1, max_cpu_loras=1)
    bench.put(generate(0, PROMPT, adapter_id=1, max_tokens=10))
    bench.turn()
    bench.put(load(2))
    for _ in range(5):
        bench.turn()
    assert bench.store.reads == [1] and bench.engine.registered == {1}
    bench.finish()
    assert bench.store.reads == [1, 2] and bench.replies.adapters[-1] == AdapterLoaded(-2, 2)


def test_thousand_adapters_leave_nothing_behind() -> None:
    bench = make_bench(max_loras=4, max_cpu_loras=8)
    for adapter_id in range(1, 1001):
        bench.put(load(adapter_id))
        bench.turn()
        bench.turn()
        bench.put(generate(adapter_id, [adapter_id % 30], adapter_id=adapter_id, max_tokens=2))
        if adapter_id > 20:
            bench.put(UnloadAdapter(adapter_id - 20))
    bench.finish()
    assert all(bench.replies[each].tokens == continuation([each % 30], 2, each) for each in range(1, 1001))
    bench.put(*(UnloadAdapter(each) for each in range(981, 1001)))
    bench.finish()
    assert not bench.engine.registered and not bench.scheduler._adapters._adapters
    assert bench.stats[-1].resident_adapters == []


def test_adapters_that_were_refused_at_the_start_are_reported_in_the_first_turn() -> None:
    bench = SchedulerBench(enable_lora=True, adapters=[load(1)], adapter_errors={1: "cut short"})
    bench.turn()
    assert bench.channel.waits == [False]
    assert bench.replies.adapters == [AdapterRefused(-1, 1, "cut short")]


def test_ranks_that_could_not_read_the_same_adapters_differ_before_the_first_step() -> None:
    faults: tuple[dict[int, str], ...] = (
        {},
        {1: "cut short"},
        {2: "cut short"},
        {1: "cut short", 2: "no such file"},
    )
    checksums = [
        SchedulerBench(enable_lora=True, adapters=[load(1), load(2)], adapter_errors=each).scheduler.checksum
        for each in faults
    ]
    assert len(set(checksums)) == len(faults)
