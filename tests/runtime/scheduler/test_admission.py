"""The estimate behind admission: it never reserves whole outputs, and learns from preemptions."""

import numpy as np
from scheduler_bench import SchedulerBench, generate
from simulated_engine import continuation

from skiff_runtime.kvcache.prefix_cache import NO_PAGES
from skiff_runtime.messages import SamplingSpec, TextOptions
from skiff_runtime.scheduler.admission import INITIAL_NEW_TOKEN_RATIO, MIN_NEW_TOKEN_RATIO, Admission
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Slots


def request(uid: int, prompt: int, max_tokens: int) -> Request:
    return Request(
        uid=uid,
        place=(uid, uid),
        tokens=np.zeros(prompt, np.int32),
        prompt_tokens=prompt,
        sampling=SamplingSpec(max_tokens=max_tokens, seed=0),
        text=TextOptions(),
    )


def one_running() -> Slots:
    """A slot whose request has a prompt of 10 tokens, all computed, and may produce 100."""
    slots = Slots(count=4, max_tokens=256, max_pages=64)
    slots.open(request(0, 10, 100), np.zeros(0, np.int32))
    slots.computed[0], slots.held[0] = 10, 3
    return slots


def fits(admission: Admission, available_pages: int) -> bool:
    return admission.fits(
        request(1, 20, 100),
        cached_pages=2,
        available_pages=available_pages,
        expected=admission.expected(one_running()),
    )


def test_the_estimate_counts_pages_of_all() -> None:
    admission = Admission(page_size=4)
    assert INITIAL_NEW_TOKEN_RATIO == 0.7
    # The running one: ceil((10 + 70) / 4) - 3 held = 17; the new one: ceil((20 + 70) / 4) - 2 cached = 21.
    assert fits(admission, 38)
    assert not fits(admission, 37)


def test_what_all_expect_is_the_sum_of_what_each_does() -> None:
    random = np.random.default_rng(0)
    for page_size in (1, 4, 16):
        admission = Admission(page_size)
        slots = Slots(count=8, max_tokens=2048, max_pages=2048)
        for uid in range(7):
            slots.open(request(uid, int(random.integers(1, 300)), int(random.integers(1, 900))), NO_PAGES)
            slots.computed[uid], slots.held[uid] = random.integers(0, 400), random.integers(0, 20)
            slots.num_unplanned_outputs[uid] -= random.integers(0, slots.num_unplanned_outputs[uid])
        slots.end(3)
        admission.share = float(random.random())
        alive = (slot for slot in range(8) if slots.alive[slot])
        assert (
            admission.expected(slots) == sum(admission.estimate_pages_of(slot, slots) for slot in alive) > 0
        )


def test_the_share_falls_with_steps_and_rises_with_retractions() -> None:
    admission = Admission(page_size=4)
    for _ in range(1000):
        admission.decay_ratio()
    assert admission.share == MIN_NEW_TOKEN_RATIO
    assert fits(admission, 10)
    admission.raise_ratio(one_running())
    assert admission.share == 0.32, "32 steps ahead of the 100 tokens it may produce"
    for _ in range(20):
        admission.raise_ratio(one_running())
    assert admission.share == 1.0


def test_more_run_than_whole_outputs_would_allow() -> None:
    bench = SchedulerBench(num_pages=40, page_size=4, max_model_len=160)
    bench.put(*(generate(uid, [uid], max_tokens=100, stops=tuple(range(40))) for uid in range(2)))
    bench.turn()
    assert bench.engine.plans[0].slots.tolist() == [0, 1]
    bench.finish()


def test_one_request_runs_whatever_the_estimate_says() -> None:
    bench = SchedulerBench(num_pages=10, page_size=4, max_model_len=64)
    bench.put(generate(0, range(8), max_tokens=32), generate(1, range(8, 16), max_tokens=32))
    bench.finish()
    for uid, prompt in enumerate((range(8), range(8, 16))):
        assert bench.replies[uid].tokens == continuation(prompt, 32)
