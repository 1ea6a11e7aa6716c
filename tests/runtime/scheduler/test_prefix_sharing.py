"""A prefix that requests share is computed once, whenever they arrive: measured in prefill tokens."""

import pytest
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.messages import FlushCache, Flushed

STEM = [(7 * i + i // 11) % EOS for i in range(150)]
TAILS = [[uid] * (1 + 3 * uid) for uid in range(6)]
PAGE_SIZES = [1, 16, 64]


def round_down(tokens: int, page_size: int) -> int:
    """Round a number of tokens down to whole pages."""
    return tokens // page_size * page_size


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [24, 100, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_shared_prefix_is_computed_once(page_size: int, budget: int, overlap: bool, late: int) -> None:
    """All requests arrive at once, or the others between two chunks of the first."""
    bench = SchedulerBench(
        num_pages=2048 // page_size,
        max_model_len=256,
        page_size=page_size,
        max_num_batched_tokens=budget,
        disable_overlap_schedule=not overlap,
    )
    prompts = [STEM + tail for tail in TAILS]
    bench.put(generate(0, prompts[0]))
    for _ in range(late):
        bench.turn()
    bench.put(*(generate(uid, prompt) for uid, prompt in enumerate(prompts) if uid))
    bench.finish()
    shared = round_down(len(STEM), page_size)
    own = sum(len(prompt) - shared for prompt in prompts[1:])
    assert bench.total("prefill_tokens") == len(prompts[0]) + own
    assert bench.total("hit_tokens") == shared * (len(prompts) - 1)
    assert bench.total("lookup_tokens") == sum(map(len, prompts))
    for uid, prompt in enumerate(prompts):
        assert bench.replies[uid].tokens == continuation(prompt, 4)


@pytest.mark.parametrize("budget", [24, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_identical_prompts_are_computed_once_up_to_the_last_page(page_size: int, budget: int) -> None:
    """The tokens behind the last cached page are computed by each: without them there are no logits."""
    bench = SchedulerBench(
        num_pages=2048 // page_size, max_model_len=256, page_size=page_size, max_num_batched_tokens=budget
    )
    bench.put(*(generate(uid, STEM) for uid in range(4)))
    bench.finish()
    again = len(STEM) - round_down(len(STEM) - 1, page_size)
    assert bench.total("prefill_tokens") == len(STEM) + 3 * again


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sharing_ignores_priority_and_prompt_logprobs_of_the_first_request(page_size: int) -> None:
    """A request for prompt log-probabilities computes its whole prompt; the others share it even so.

    A more urgent request does not overtake a prompt that was started, and so finds its pages cached.
    """
    bench = SchedulerBench(
        num_pages=2048 // page_size, max_model_len=256, page_size=page_size, max_num_batched_tokens=40
    )
    bench.put(generate(0, STEM, prompt_logprobs=0))
    bench.turn()
    bench.put(generate(1, [*STEM, 1], priority=-3), generate(2, [*STEM, 2], prompt_logprobs=0))
    bench.finish()
    shared = round_down(len(STEM), page_size)
    expected = len(STEM) + (len(STEM) + 1 - shared) + (len(STEM) + 1)
    assert bench.total("prefill_tokens") == expected


@pytest.mark.parametrize("page_size", [1, 4])
def test_preempted_requests_recompute_only_evicted_pages(page_size: int) -> None:
    """Preempted requests leave their prompts to the prefix cache."""
    bench = SchedulerBench(num_pages=110 // page_size, page_size=page_size, max_running_requests=4)
    stem = STEM[:40]
    bench.put(*(generate(uid, [*stem, uid], max_tokens=40) for uid in range(4)))
    bench.finish()
    assert bench.total("preempted") > 0
    for uid in range(4):
        assert bench.replies[uid].tokens == continuation([*stem, uid], 40)
    once = len(stem) + 1 + 3 * (len(stem) + 1 - round_down(len(stem), page_size))
    again = bench.total("prefill_tokens") - once
    assert again <= page_size * (bench.total("evicted_pages") + bench.total("preempted"))


@pytest.mark.parametrize("overlap", [True, False])
def test_flush_frees_only_unlocked_pages(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    bench.put(generate(0, STEM[:16]), FlushCache(50))
    bench.finish()
    bench.put(generate(1, [*STEM[:8], 1], max_tokens=20))
    bench.turn()
    bench.put(FlushCache(51))
    bench.finish()
    bench.put(FlushCache(52), FlushCache(53))
    bench.turn()
    # Request 0 had 20 tokens, of which the last was never computed; request 1 has 2 of its pages locked.
    assert bench.replies.flushed == [
        Flushed(50, pages=0, running=0),
        Flushed(51, pages=2, running=1),
        Flushed(52, pages=7, running=0),
        Flushed(53, pages=0, running=0),
    ]
    assert bench.replies[1].tokens == continuation([*STEM[:8], 1], 20)
    assert bench.total("evicted_pages") == 0
    bench.put(generate(2, STEM[:16]))
    bench.finish()
    opened = bench.replies[2].opened
    assert opened is not None and opened.cached_tokens == 0
