"""When a refused client is told to come back."""

from hypothesis import example, given
from hypothesis import strategies as st

from skiff_runtime.api.dispatch.retry_after import MAX_WAIT_SECONDS, WINDOW_SECONDS, RetryAfterEstimator


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_place_in_half_a_second_is_told_as_one() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for _ in range(60):
        clock.now += 0.5
        estimator.record_completion()
    assert estimator.retry_after_seconds() == 1


def test_each_refused_client_is_told_a_later_place() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for _ in range(2 * WINDOW_SECONDS):
        clock.now += 1
        estimator.record_completion()
    told = [estimator.retry_after_seconds() for _ in range(20)]
    assert told == sorted(told) and 19 <= told[-1] <= 21
    for _ in range(30):
        clock.now += 1
        estimator.record_completion()
    assert estimator.retry_after_seconds() == 1


def test_what_ended_long_ago_does_not_count() -> None:
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
def test_a_wait_is_always_within_its_limits(steps: list[tuple[float, bool]]) -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    for seconds, ended in steps:
        clock.now += seconds
        if ended:
            estimator.record_completion()
        assert 1 <= estimator.retry_after_seconds() <= MAX_WAIT_SECONDS
