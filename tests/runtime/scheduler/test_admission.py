"""The admission estimate reserves a share of the outputs, and learns from preemptions."""

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
        queue_key=(uid, uid),
        tokens=np.zeros(prompt, np.int32),
        prompt_tokens=prompt,
        sampling=SamplingSpec(max_tokens=max_tokens, seed=0),
        text=TextOptions(),
    )


def one_running() -> Slots:
    """Return slots with one request: a prompt of 10 tokens, all computed, and up to 100 output tokens."""
    slots = Slots(count=4, max_tokens=256, max_pages=64)
    slots.open(request(0, 10, 100), NO_PAGES, 0)
    slots.num_computed_tokens[0], slots.num_pages[0] = 10, 3
    return slots


def has_room(admission: Admission, available_pages: int) -> bool:
    return admission.has_room(
        request(1, 20, 100),
        cached_pages=2,
        available_pages=available_pages,
        expected_pages=admission.estimate_pages(one_running()),
    )


def test_estimate_counts_pages_of_running_and_new_requests() -> None:
    admission = Admission(page_size=4)
    assert INITIAL_NEW_TOKEN_RATIO == 0.7
    # Running: ceil((10 + 70) / 4) - 3 pages that it has = 17. New: ceil((20 + 70) / 4) - 2 cached = 21.
    assert has_room(admission, 38)
    assert not has_room(admission, 37)


def test_estimate_of_all_is_the_sum_of_estimates_of_each() -> None:
    random = np.random.default_rng(0)
    for page_size in (1, 4, 16):
        admission = Admission(page_size)
        slots = Slots(count=8, max_tokens=2048, max_pages=2048)
        for uid in range(7):
            slots.open(request(uid, int(random.integers(1, 300)), int(random.integers(1, 900))), NO_PAGES, 0)
            slots.num_computed_tokens[uid], slots.num_pages[uid] = (
                random.integers(0, 400),
                random.integers(0, 20),
            )
            slots.num_unplanned_outputs[uid] -= random.integers(0, slots.num_unplanned_outputs[uid])
        slots.finish(3)
        admission.new_token_ratio = float(random.random())
        alive = (slot for slot in range(8) if slots.alive[slot])
        assert (
            admission.estimate_pages(slots)
            == sum(admission.estimate_pages_of(slot, slots) for slot in alive)
            > 0
        )


def test_ratio_decays_with_steps_and_rises_with_preemptions() -> None:
    admission = Admission(page_size=4)
    for _ in range(1000):
        admission.decay_ratio()
    assert admission.new_token_ratio == MIN_NEW_TOKEN_RATIO
    assert has_room(admission, 10)
    admission.raise_ratio(one_running())
    assert admission.new_token_ratio == 0.32, "32 steps ahead of the 100 tokens it may produce"
    for _ in range(20):
        admission.raise_ratio(one_running())
    assert admission.new_token_ratio == 1.0


def test_more_requests_run_than_whole_outputs_would_fit() -> None:
    bench = SchedulerBench(num_pages=40, page_size=4, max_model_len=160)
    bench.put(*(generate(uid, [uid], max_tokens=100, stop_token_ids=tuple(range(40))) for uid in range(2)))
    bench.turn()
    assert bench.engine.plans[0].slots.tolist() == [0, 1]
    bench.finish()


def test_single_request_runs_whatever_the_estimate() -> None:
    bench = SchedulerBench(num_pages=10, page_size=4, max_model_len=64)
    bench.put(generate(0, range(8), max_tokens=32), generate(1, range(8, 16), max_tokens=32))
    bench.finish()
    for uid, prompt in enumerate((range(8), range(8, 16))):
        assert bench.replies[uid].tokens == continuation(prompt, 32)
