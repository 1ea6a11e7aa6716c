"""The end of requests: end of sequence, stop tokens, length, abort at any moment, errors, refusal."""

import numpy as np
import pytest
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import SimulatedStep, continuation

from skiff_runtime.messages import AbortRequest, CompiledGrammar, FinishReason, Shutdown, Wire
from skiff_runtime.step import StepResult


def prompt_with_eos(*, within: int) -> tuple[list[int], int]:
    """Return a prompt whose continuation has an EOS within ``within`` tokens, but not first, and the index."""
    for first in range(200):
        tokens = continuation([first % EOS, first // EOS], within)
        if EOS in tokens[1:] and tokens[0] != EOS:
            return [first % EOS, first // EOS], tokens.index(EOS)
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("overlap", [True, False])
def test_end_of_sequence_is_the_last_token_unless_ignored(overlap: bool) -> None:
    prompt, index = prompt_with_eos(within=12)
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    bench.put(generate(0, prompt, max_tokens=20, ignore_eos=False), generate(1, prompt, max_tokens=20))
    bench.finish()
    assert bench.replies[0].tokens == continuation(prompt, index + 1)
    assert bench.replies[0].finish == FinishReason.STOP
    assert bench.replies[1].tokens == continuation(prompt, 20)
    assert bench.replies[1].finish == FinishReason.LENGTH


def test_end_of_sequence_as_the_last_allowed_token_counts_as_stop() -> None:
    prompt, index = prompt_with_eos(within=12)
    bench = SchedulerBench()
    bench.put(generate(0, prompt, max_tokens=index + 1, ignore_eos=False))
    bench.finish()
    assert bench.replies[0].finish == FinishReason.STOP


def test_stop_tokens_end_requests_that_ignore_eos() -> None:
    tokens = continuation([7, 7], 10)
    stop = tokens[5]
    bench = SchedulerBench()
    bench.put(
        generate(0, [7, 7], max_tokens=10, stop_token_ids=(EOS + 1000, stop)),
        generate(1, [7, 7], max_tokens=10),
    )
    bench.finish()
    assert bench.replies[0].tokens == tokens[: tokens.index(stop) + 1]
    assert bench.replies[0].finish == FinishReason.STOP
    assert bench.replies[1].tokens == tokens


def test_ended_request_keeps_its_pages_until_its_step_in_flight_retires() -> None:
    prompt, index = prompt_with_eos(within=12)
    bench = SchedulerBench(disable_radix_cache=True)
    bench.put(generate(0, prompt, max_tokens=30, ignore_eos=False))
    while not (0 in bench.replies and bench.replies[0].has_ended):
        bench.turn()
    assert bench.engine.plans[-1].starts.tolist() == [len(prompt) + index]
    assert bench.stats[-1].pages_free < bench.stats[-1].pages_total
    bench.finish()
    assert bench.stats[-1].pages_free == bench.stats[-1].pages_total


def test_abort_is_confirmed_before_the_wait_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SchedulerBench()
    bench.put(generate(0, [0, 1], max_tokens=30), generate(1, [1, 2], max_tokens=30))
    bench.turn()
    confirmed: list[bool] = []
    wait_for_result = SimulatedStep.result

    def record(step: SimulatedStep) -> StepResult:
        sent = [uid for batch in bench.channel.sent for uid in np.frombuffer(batch.uids, Wire.UID)]
        confirmed.append(1 in sent)
        return wait_for_result(step)

    monkeypatch.setattr(SimulatedStep, "result", record)
    bench.put(AbortRequest(1))
    bench.turn()
    assert confirmed and confirmed[0]
    assert bench.replies[1].finish == FinishReason.ABORT
    bench.finish()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("turns", range(9))
def test_abort_at_any_moment_ends_a_request_once(turns: int, overlap: bool) -> None:
    """Queued, between chunks, decoding, in flight, ended: each request ends once, and no other is affected."""
    bench = SchedulerBench(
        max_num_batched_tokens=6, max_running_requests=2, num_pages=12, disable_overlap_schedule=not overlap
    )
    bench.put(*(generate(uid, [uid, *range(9)], max_tokens=6) for uid in range(5)))
    for _ in range(turns):
        bench.turn()
    bench.put(AbortRequest(1), AbortRequest(4, FinishReason.STOP), AbortRequest(1), AbortRequest(77))
    bench.finish()
    assert sorted(bench.replies) == [0, 1, 2, 3, 4]
    for uid, reply in bench.replies.items():
        tokens = continuation([uid, *range(9)], 6)
        if uid in (0, 2, 3):
            assert (reply.tokens, reply.finish) == (tokens, FinishReason.LENGTH)
        else:
            assert reply.has_ended and reply.tokens == tokens[: len(reply.tokens)]
    assert bench.replies[4].finish == FinishReason.STOP
    assert bench.replies[4].opened is None


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("admitted", [0, 1, 6])
def test_request_whose_grammar_admits_no_token_fails_alone(admitted: int, overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    grammar = CompiledGrammar(b"key", str(admitted).encode())
    bench.put(
        generate(0, [5, 6, 7], max_tokens=9),
        generate(1, [5, 6, 8], max_tokens=9, grammar=grammar, logprobs=2),
        generate(2, [5, 6, 9], max_tokens=9, logprobs=2),
    )
    bench.finish()
    stuck = bench.replies[1]
    assert stuck.tokens == continuation([5, 6, 8], admitted) and len(stuck.logprobs) == admitted
    assert stuck.failed is not None and (stuck.failed.status, stuck.failed.code) == (400, "grammar_stuck")
    assert bench.replies[0].tokens == continuation([5, 6, 7], 9)
    assert bench.replies[2].tokens == continuation([5, 6, 9], 9)
    assert [token for token, *_ in bench.replies[2].logprobs] == bench.replies[2].tokens
    bench.put(generate(3, [5, 6, 8, *continuation([5, 6, 8], 7)], max_tokens=4))
    bench.finish()
    assert bench.replies[3].tokens == continuation([5, 6, 8], 11)[7:]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 6])
def test_nan_logits_fail_one_request_and_leave_nothing_in_the_prefix_cache(
    max_num_batched_tokens: int, overlap: bool
) -> None:
    """A NaN left in the KV cache would fail every later request that shares the prefix."""
    bench = SchedulerBench(
        disable_overlap_schedule=not overlap, max_num_batched_tokens=max_num_batched_tokens
    )
    shared, broken = [1, 2, 3, 4, 5, 6, 7, 8], 33
    bench.engine.nan_token = broken
    bench.put(
        generate(0, [*shared, 9, 10, 11], max_tokens=9),
        generate(1, [*shared, broken, 12, 13, 14, 15, 16], max_tokens=9, logprobs=2),
        generate(2, [20, 21, 22], max_tokens=9, logprobs=2),
    )
    bench.finish()
    failed = bench.replies[1].failed
    assert failed is not None and (failed.status, failed.code) == (500, "nan_logits")
    assert bench.replies[1].tokens == [] and bench.total("corrupted") == 1
    assert bench.replies[0].tokens == continuation([*shared, 9, 10, 11], 9)
    assert bench.replies[2].tokens == continuation([20, 21, 22], 9)
    assert [token for token, *_ in bench.replies[2].logprobs] == bench.replies[2].tokens
    bench.engine.nan_token = None
    prompt = [*shared, broken, 12, 13, 14, 15, 16]
    bench.put(generate(3, prompt, max_tokens=5))
    bench.finish()
    assert bench.replies[3].tokens == continuation(prompt, 5)


def test_nan_in_a_shared_prefix_fails_only_the_requests_that_read_it() -> None:
    """The prefix was cached while it held a NaN: requests that match it fail once, then it is computed anew."""
    bench = SchedulerBench()
    shared, broken = [1, 2, 3, 33, 5, 6, 7, 8], 33
    bench.engine.nan_token = broken
    bench.put(*(generate(uid, [*shared, uid, uid, uid], max_tokens=6) for uid in range(4)))
    bench.put(generate(9, [20, 21, 22, 23, 24], max_tokens=6))
    bench.turn()
    bench.turn()  # the simulated engine runs a step once the next is launched
    bench.engine.nan_token = None
    bench.finish()
    assert all(bench.replies[uid].failed is not None for uid in range(4)) and bench.total("corrupted") == 4
    assert bench.replies[9].tokens == continuation([20, 21, 22, 23, 24], 6)
    bench.put(*(generate(10 + uid, [*shared, uid], max_tokens=6) for uid in range(4)))
    bench.finish()
    for uid in range(4):
        assert bench.replies[10 + uid].tokens == continuation([*shared, uid], 6)


def test_request_that_can_never_run_is_refused_with_its_numbers() -> None:
    bench = SchedulerBench(num_pages=5, page_size=4, max_model_len=64)
    bench.put(
        generate(0, range(16), max_tokens=5),
        generate(1, range(16), max_tokens=4),
        generate(2, range(60), max_tokens=5),
        generate(3, [], max_tokens=5),
        generate(4, [1], max_tokens=-1),
    )
    bench.finish()
    failures = {uid: reply.failed for uid, reply in bench.replies.items() if reply.failed}
    assert {uid: (failed.status, failed.code, failed.param) for uid, failed in failures.items()} == {
        0: (400, "context_length_exceeded", None),
        2: (400, "context_length_exceeded", None),
        3: (400, None, "prompt"),
        4: (400, None, "max_tokens"),
    }
    assert "16 tokens and max_tokens is 5, together 21" in failures[0].message
    assert "KV cache of this server holds 20 tokens" in failures[0].message
    assert "context is 64 tokens" in failures[2].message
    assert bench.replies[1].tokens == continuation(range(16), 4)


@pytest.mark.parametrize(("num_pages", "length"), [(5, 20), (40, 64)])
def test_output_without_limit_may_fill_the_context_or_the_kv_cache(num_pages: int, length: int) -> None:
    bench = SchedulerBench(num_pages=num_pages, page_size=4, max_model_len=64)
    bench.put(generate(0, range(16), max_tokens=0), generate(1, range(length), max_tokens=0))
    bench.finish()
    assert bench.replies[0].tokens == continuation(range(16), length - 16)
    assert bench.replies[0].finish == FinishReason.LENGTH
    refused = bench.replies[1].failed
    assert refused is not None and refused.code == "context_length_exceeded"


@pytest.mark.parametrize(("limit", "output"), [(3, 3), (4, 4), (5, 4), (10**6, 4)])
def test_fits_context_lowers_max_tokens_to_what_is_left(limit: int, output: int) -> None:
    bench = SchedulerBench(num_pages=5, page_size=4, max_model_len=64)
    bench.put(generate(0, range(16), max_tokens=limit, fits_context=True))
    bench.finish()
    assert bench.replies[0].tokens == continuation(range(16), output)
    assert bench.replies[0].finish == FinishReason.LENGTH


def test_shutdown_retires_the_step_in_flight() -> None:
    bench = SchedulerBench()
    bench.put(generate(0, [1, 2, 3], max_tokens=50))
    bench.turn()
    bench.turn()
    assert len(bench.engine.plans) == 2
    bench.channel.arriving.append(Shutdown())
    assert bench.turn() is False
    assert len(bench.engine.plans) == 2
    assert bench.replies[0].tokens == continuation([1, 2, 3], 2)
