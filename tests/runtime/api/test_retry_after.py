"""Estimates of Retry-After."""

from hypothesis import example, given
from hypothesis import strategies as st

from skiff_runtime.api.dispatch.retry_after import MAX_WAIT_SECONDS, WINDOW_SECONDS, RetryAfterEstimator


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_retry_after_is_at_least_one_second() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for _ in range(60):
        clock.now += 0.5
        estimator.record_completion()
    assert estimator.retry_after_seconds() == 1


def test_rejected_clients_return_one_after_the_other() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for _ in range(2 * WINDOW_SECONDS):
        clock.now += 1
        estimator.record_completion()
    delays = [estimator.retry_after_seconds() for _ in range(20)]
    assert delays == sorted(delays) and 19 <= delays[-1] <= 21
    for _ in range(30):
        clock.now += 1
        estimator.record_completion()
    assert estimator.retry_after_seconds() == 1


def test_old_completions_do_not_count() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for _ in range(1000):
        estimator.record_completion()
    assert estimator.rate() > 500
    clock.now += WINDOW_SECONDS + 1
    assert estimator.rate() == 1 / WINDOW_SECONDS
    assert estimator.retry_after_seconds() == MAX_WAIT_SECONDS


@example([(2.0**-44, False)] * 60)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60))
def test_retry_after_is_always_within_limits(steps: list[tuple[float, bool]]) -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for seconds, completed in steps:
        clock.now += seconds
        if completed:
            estimator.record_completion()
        assert 1 <= estimator.retry_after_seconds() <= MAX_WAIT_SECONDS
