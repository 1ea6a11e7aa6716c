"""Log-probabilities reach the requests that want them, once each, through drops, preemption and cached prefixes."""

import pytest
from scheduler_bench import EOS, UNPREDICTED, ReceivedLogprobs, SchedulerBench, generate
from simulated_engine import continuation, token_logprobs

from skiff_runtime.messages import AbortRequest, CompiledGrammar


def expected_logprobs(prompt: list[int], count: int, top: int) -> list[ReceivedLogprobs]:
    """Return the log-probabilities of a whole answer."""
    tokens = continuation(prompt, count)
    return [(token, *token_logprobs([*prompt, *tokens[:i]], token, top)) for i, token in enumerate(tokens)]


def expected_prompt_logprobs(prompt: list[int], top: int) -> list[ReceivedLogprobs]:
    """Return the log-probabilities of a prompt."""
    later = [(prompt[i], *token_logprobs(prompt[:i], prompt[i], top)) for i in range(1, len(prompt))]
    return [(prompt[0], *UNPREDICTED), *later]


@pytest.mark.parametrize("overlap", [True, False])
def test_each_request_gets_as_many_top_logprobs_as_requested(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    bench.put(*(generate(uid, [uid, 9], max_tokens=5, logprobs=top) for uid, top in enumerate((None, 0, 3))))
    bench.finish()
    assert bench.replies[0].logprobs == []
    assert bench.replies[1].logprobs == expected_logprobs([1, 9], 5, 0)
    assert bench.replies[2].logprobs == expected_logprobs([2, 9], 5, 3)


def test_logprobs_of_rows_of_ended_requests_are_dropped() -> None:
    prompt = next([a, b] for a in range(EOS) for b in range(EOS) if EOS in continuation([a, b], 6)[1:-1])
    bench = SchedulerBench()
    bench.put(
        generate(0, prompt, max_tokens=9, ignore_eos=False, logprobs=1),
        generate(1, [3, 4], max_tokens=9, logprobs=2),
        generate(2, [5], max_tokens=9, logprobs=2),
    )
    for _ in range(4):
        bench.turn()
    bench.put(AbortRequest(2))
    bench.finish()
    ended = len(bench.replies[0].tokens)
    assert bench.replies[0].logprobs == expected_logprobs(prompt, ended, 1)
    assert bench.replies[1].logprobs == expected_logprobs([3, 4], 9, 2)
    assert bench.replies[2].logprobs == expected_logprobs([5], len(bench.replies[2].tokens), 2)


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_prompt_logprobs_cover_a_cached_prompt(budget: int, length: int) -> None:
    bench = SchedulerBench(max_num_batched_tokens=budget)
    prompt = [(7 * i) % EOS for i in range(length)]
    bench.put(generate(0, prompt))
    bench.finish()
    bench.put(generate(1, prompt, prompt_logprobs=2), generate(2, [*prompt, 1]))
    bench.finish()
    assert bench.replies[1].prompt_logprobs == expected_prompt_logprobs(prompt, 2)
    opened = bench.replies[1].opened
    assert opened is not None and opened.cached_tokens == 0
    assert bench.replies[1].tokens == continuation(prompt, 4)
    assert bench.replies[2].tokens == continuation([*prompt, 1], 4)


def test_prompt_computed_for_logprobs_is_cached() -> None:
    bench = SchedulerBench()
    prompt = list(range(17))
    bench.put(generate(0, prompt, prompt_logprobs=0))
    bench.finish()
    bench.put(generate(1, prompt))
    bench.finish()
    opened = bench.replies[1].opened
    assert opened is not None and opened.cached_tokens == 16
    assert (bench.total("lookup_tokens"), bench.total("hit_tokens")) == (17, 16)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_preemption_sends_no_prompt_logprobs_twice(overlap: bool, disable_radix_cache: bool) -> None:
    bench = SchedulerBench(
        num_pages=22,
        page_size=1,
        max_running_requests=2,
        disable_overlap_schedule=not overlap,
        disable_radix_cache=disable_radix_cache,
    )
    prompts = [[1, 2], [3, 4], [5, 6]]
    bench.put(
        *(generate(uid, p, max_tokens=12, logprobs=1, prompt_logprobs=1) for uid, p in enumerate(prompts))
    )
    bench.finish()
    assert bench.total("preempted") > 0
    for uid, prompt in enumerate(prompts):
        assert bench.replies[uid].prompt_logprobs == expected_prompt_logprobs(prompt, 1)
        assert bench.replies[uid].logprobs == expected_logprobs(prompt, 12, 1)


def test_preempted_request_reopens_with_its_grammar() -> None:
    bench = SchedulerBench(num_pages=22, page_size=1, max_running_requests=2)
    grammar = CompiledGrammar(b"key", b"100")
    bench.put(generate(0, [1, 2], max_tokens=12), generate(1, [3, 4], max_tokens=12, grammar=grammar))
    bench.finish()
    opened = [(each.grammar, each.prompt_tokens) for plan in bench.engine.plans for each in plan.opened]
    assert opened == [(None, 2), (grammar, 2), (grammar, 2)]
