"""A prefix that requests share is computed once, however they come together: counted in tokens computed."""

import pytest
from scheduler_bench import EOS, SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.messages import FlushCache, Flushed

STEM = [(7 * place + place // 11) % EOS for place in range(150)]
TAILS = [[uid] * (1 + 3 * uid) for uid in range(6)]
PAGE_SIZES = [1, 16, 64]


def pages_of(tokens: int, page_size: int) -> int:
    """The tokens of the whole pages among so many."""
    return tokens // page_size * page_size


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [24, 100, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_stem_is_computed_once(page_size: int, budget: int, overlap: bool, late: int) -> None:
    """All at once, or the others while the first is between its chunks."""
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
    shared = pages_of(len(STEM), page_size)
    own = sum(len(prompt) - shared for prompt in prompts[1:])
    assert bench.total("prefill_tokens") == len(prompts[0]) + own
    assert bench.total("hit_tokens") == shared * (len(prompts) - 1)
    assert bench.total("lookup_tokens") == sum(map(len, prompts))
    for uid, prompt in enumerate(prompts):
        assert bench.replies[uid].tokens == continuation(prompt, 4)


@pytest.mark.parametrize("budget", [24, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_copies_compute_their_prompt_once(page_size: int, budget: int) -> None:
    """But for what lies behind its last whole page, without which there is nothing to sample from."""
    bench = SchedulerBench(
        num_pages=2048 // page_size, max_model_len=256, page_size=page_size, max_num_batched_tokens=budget
    )
    bench.put(*(generate(uid, STEM) for uid in range(4)))
    bench.finish()
    again = len(STEM) - pages_of(len(STEM) - 1, page_size)
    assert bench.total("prefill_tokens") == len(STEM) + 3 * again


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_priority_and_logprobs_of_the_first_change_nothing(page_size: int) -> None:
    """Who asks for its prompt's log-probabilities computes all of it; the others follow even so.

    One that is more urgent does not run ahead of a prompt that was begun, but behind it, and finds its pages.
    """
    bench = SchedulerBench(
        num_pages=2048 // page_size, max_model_len=256, page_size=page_size, max_num_batched_tokens=40
    )
    bench.put(generate(0, STEM, prompt_logprobs=0))
    bench.turn()
    bench.put(generate(1, [*STEM, 1], priority=-3), generate(2, [*STEM, 2], prompt_logprobs=0))
    bench.finish()
    shared = pages_of(len(STEM), page_size)
    expected = len(STEM) + (len(STEM) + 1 - shared) + (len(STEM) + 1)
    assert bench.total("prefill_tokens") == expected


@pytest.mark.parametrize("page_size", [1, 4])
def test_sharing_goes_on_where_memory_is_short(page_size: int) -> None:
    """Preempted requests leave their prompts to the cache, and compute no more than was evicted."""
    bench = SchedulerBench(num_pages=110 // page_size, page_size=page_size, max_running_requests=4)
    stem = STEM[:40]
    bench.put(*(generate(uid, [*stem, uid], max_tokens=40) for uid in range(4)))
    bench.finish()
    assert bench.total("preempted") > 0
    for uid in range(4):
        assert bench.replies[uid].tokens == continuation([*stem, uid], 40)
    once = len(stem) + 1 + 3 * (len(stem) + 1 - pages_of(len(stem), page_size))
    again = bench.total("prefill_tokens") - once
    assert again <= page_size * (bench.total("evicted_pages") + bench.total("preempted"))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_flush_forgets_what_nobody_holds(overlap: bool) -> None:
    bench = SchedulerBench(disable_overlap_schedule=not overlap)
    bench.put(generate(0, STEM[:16]), FlushCache(50))
    bench.finish()
    bench.put(generate(1, [*STEM[:8], 1], max_tokens=20))
    bench.turn()
    bench.put(FlushCache(51))
    bench.finish()
    bench.put(FlushCache(52), FlushCache(53))
    bench.turn()
    # Of request 0: 20 tokens, of which the last was never computed; request 1 holds 2 pages of them.
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
