"""The load of a pod from its page of metrics: of any page, and over time."""

import pytest

from skiff_operator import pod_load
from skiff_operator.autoscaling import PodLoad
from skiff_operator.pod_load import LoadHistory, PodReading

PAGE = """# TYPE skiff_requests_running gauge
skiff_requests_running 3.0
skiff_requests_queued 2.0
skiff_queued_prompt_tokens 900.0
skiff_kv_cache_usage_ratio 0.25
skiff_requests_in_flight 6.0
skiff_requests_total{outcome="finished",endpoint="chat"} 40.0
skiff_requests_total{outcome="failed",endpoint="chat"} 2.0
skiff_time_to_first_token_seconds_bucket{le="+Inf"} 20.0
skiff_time_to_first_token_seconds_sum 10.0
skiff_time_to_first_token_seconds_count 20.0
"""


def reading(page: str = PAGE) -> PodReading:
    """The reading of a page that has one."""
    found = pod_load.read(page)
    assert found is not None
    return found


def test_a_page_has_the_load() -> None:
    assert LoadHistory().add(0, reading()) == PodLoad(
        running=3, waiting=2, queued_tokens=900, kv_usage=0.25, ttft_seconds=None, accepted=48
    )
    assert LoadHistory().add(0, reading()).requests == 5


@pytest.mark.parametrize(
    "page",
    ["", "<html>", "skiff_requests_running 1\n", "skiff_requests_running NaN\nskiff_requests_queued 1\n"],
)
def test_a_page_without_requests_has_no_load(page: str) -> None:
    assert pod_load.read(page) is None


def test_other_figures_may_be_missing() -> None:
    found = reading("skiff_requests_running 1\nskiff_requests_queued 0\nskiff_kv_cache_usage_ratio 7\n")
    assert LoadHistory().add(0, found) == PodLoad(running=1, kv_usage=1)


def test_the_time_to_first_token_is_that_of_recent_requests() -> None:
    def later(total: float, count: float) -> PodReading:
        page = PAGE.replace("seconds_sum 10.0", f"seconds_sum {total}")
        return reading(page.replace("seconds_count 20.0", f"seconds_count {count}"))

    history = LoadHistory()
    assert history.add(0, later(10, 20)).ttft_seconds is None
    assert history.add(1, later(16, 22)).ttft_seconds == 3
    assert history.add(30, later(16, 22)).ttft_seconds == 3
    assert history.add(32, later(16, 22)).ttft_seconds is None, "no request had a first token within 30 s"
    assert history.add(33, later(17, 23)).ttft_seconds == 1
    assert history.add(34, later(1, 1)).ttft_seconds is None, "another server counts anew"
    assert history.add(35, later(3, 2)).ttft_seconds == 2
