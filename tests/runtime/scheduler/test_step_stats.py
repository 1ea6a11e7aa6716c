"""Statistics for routers: each prompt token and each received request is in them from the first report on."""

from scheduler_bench import SchedulerBench, generate


def test_prompt_that_starts_from_idle_counts_until_it_is_computed() -> None:
    bench = SchedulerBench(max_num_batched_tokens=16)
    bench.put(generate(0, [1] * 40))
    bench.turn()
    assert bench.stats, "the start is reported before the first step has ended"
    assert [(each.running, each.prefill_tokens_left) for each in bench.stats] == [(1, 40)]
    bench.finish()
    left = [each.prefill_tokens_left for each in bench.stats]
    assert left == sorted(left, reverse=True) and left[-1] == 0


def test_received_requests_are_reported_once() -> None:
    bench = SchedulerBench()
    bench.put(generate(3, [1] * 8), generate(4, [], max_tokens=1))
    bench.turn()
    bench.put(generate(5, [2] * 8))
    bench.finish()
    received = [uid for each in bench.stats for uid in each.received]
    assert received == [3, 4, 5, -1], "with one that failed at once, and the last one of ``finish``"
