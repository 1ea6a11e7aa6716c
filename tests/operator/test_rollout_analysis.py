"""The comparison of two revisions by their pods' metrics: what proves that the new one is worse, and what does not."""

import math
import random
from typing import Any

import msgspec
import pytest
from metrics_pages import BOUNDS, request_counts

from skiff_operator import rollout_analysis
from skiff_operator.rollout_analysis import (
    Analysis,
    Counts,
    Figures,
    Situation,
    Tally,
    Times,
    advance,
    compare,
    measure,
    wilson_interval,
)
from skiff_operator.spec import RolloutAnalysis

LIMITS = RolloutAnalysis()
NOW = "2026-01-01T00:00:00Z"


def counts(requests: int = 0, failed: int = 0, seconds: dict[float, int] | None = None) -> Counts:
    """Return counts of requests, with the number of first tokens by their time in seconds."""
    taken = [each for each, number in (seconds or {}).items() for _ in range(number)]
    found = rollout_analysis.read(request_counts(requests - failed, failed, taken))
    assert found is not None
    return found


def old(requests: int = 400, failed: int = 0, p90: float | None = None) -> Figures:
    return Figures("old", requests, failed, p90)


def reason(candidate: Counts, baseline: Figures, **limits: Any) -> str:
    found = compare(msgspec.structs.replace(LIMITS, **limits), candidate, baseline)
    return found.reason if found else ""


def test_a_page_is_read_by_outcome_and_bucket() -> None:
    page = request_counts(9, 3, [0.05, 0.2, 0.2, 300.0], aborted=5)
    found = rollout_analysis.read(page)
    times = Times(dict(zip((*BOUNDS, math.inf), (1, 3, 3, 3, 3, 4), strict=True)))
    assert found == Counts(12, 3, times)
    assert found.first_tokens.count == 4
    for hostile in (
        "",
        "<html>",
        "skiff_requests_total NaN",
        'skiff_time_to_first_token_seconds_bucket{le="1"} 3',
    ):
        assert rollout_analysis.read(hostile) is None
    nonsense = (
        page
        + 'skiff_time_to_first_token_seconds_bucket{le="x"} 3\nskiff_requests_total{outcome="failed"} -1\n'
    )
    assert rollout_analysis.read(nonsense) == found


def test_wilsons_interval_has_its_closed_forms() -> None:
    """With z = 3: 0 to z²/(n + z²) for none of n, and 1/2 ± z/(2 √(n + z²)) for half of them."""
    low, high = wilson_interval(0, 91)
    assert low == 0 and high == pytest.approx(9 / 100)
    low, high = wilson_interval(50, 100)
    assert low == pytest.approx(0.5 - 1.5 / math.sqrt(109)) and high == pytest.approx(1 - low)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_page_that_contradicts_itself_does_no_harm() -> None:
    impossible = Counts(1000, 5000, Times({1.0: 9000, 2.5: 9000, math.inf: 1000}))
    assert reason(impossible, old(p90=0.25)) == "ErrorRate"
    assert reason(impossible, old(400, 4000, 0.25)) == ""
    assert reason(Counts(-5, 3), old(-1, 2)) == ""


@pytest.mark.parametrize(
    ("candidate", "baseline", "limits", "verdict"),
    [
        (counts(120, 31), old(), {}, "ErrorRate"),
        (counts(99, 99), old(), {}, ""),
        (counts(99, 99), old(), {"min_requests": 50}, "ErrorRate"),
        (counts(100, 11), old(), {}, ""),
        (counts(100, 12), old(), {}, "ErrorRate"),
        (counts(10_000, 600), old(10_000), {}, "ErrorRate"),
        (counts(10_000, 490), old(10_000), {}, ""),
        (counts(10_000, 600), old(10_000, 250), {}, ""),
        (counts(10_000, 600), old(10_000, 250), {"max_error_ratio": 2}, "ErrorRate"),
        (counts(120, 31), old(20), {}, ""),
        (counts(120, 120), old(0), {}, ""),
        (counts(120, 31), old(), {"max_error_percent": 40}, ""),
        (counts(120, 120), old(), {"max_error_percent": 100}, ""),
    ],
    ids=[
        "far more errors",
        "too few requests",
        "a lower minimum",
        "may be chance",
        "is no chance",
        "above floor and ratio",
        "below the floor",
        "not thrice as many",
        "more than twice as many",
        "an old revision that proves little",
        "an old revision without requests",
        "a higher floor",
        "errors are off",
    ],
)
def test_error_rates(candidate: Counts, baseline: Figures, limits: dict[str, int], verdict: str) -> None:
    assert reason(candidate, baseline, **limits) == verdict


@pytest.mark.parametrize(
    ("candidate", "p90", "limits", "verdict"),
    [
        (counts(120, 0, {0.2: 75, 9.0: 45}), 0.25, {}, "SlowFirstToken"),
        (counts(120, 0, {0.2: 85, 9.0: 35}), 0.25, {}, ""),
        (counts(120, 0, {1.5: 120}), 0.1, {}, ""),
        (counts(120, 0, {1.5: 120}), 0.1, {"max_ttft_increase_milliseconds": 100}, "SlowFirstToken"),
        (counts(120, 0, {99.0: 120}), 1.0, {}, "SlowFirstToken"),
        (counts(120, 0, {9.0: 120}), 2.5, {}, ""),
        (counts(120, 0, {9.0: 120}), 2.5, {"max_ttft_ratio": 1}, ""),
        (counts(120, 0, {99.0: 120}), 2.5, {}, "SlowFirstToken"),
        (counts(120, 0, {99.0: 120}), 2.5, {"max_ttft_increase_milliseconds": 120_000}, ""),
        (counts(99, 0, {99.0: 99}), 0.25, {}, ""),
        (counts(120, 0, {99.0: 120}), None, {}, ""),
    ],
    ids=[
        "more than two in ten are slow",
        "may be chance",
        "less than a second more",
        "a smaller increase",
        "more than thrice",
        "the same bucket as thrice",
        "the increase counts in any case",
        "beyond the last bound",
        "times are off",
        "too few requests",
        "an old revision without times",
    ],
)
def test_times_to_first_token(
    candidate: Counts, p90: float | None, limits: dict[str, int], verdict: str
) -> None:
    assert reason(candidate, old(p90=p90), **limits) == verdict


def test_the_message_has_the_figures() -> None:
    errors = compare(LIMITS, counts(120, 31), old())
    assert errors is not None
    assert errors.message == "error rate 31 of 120 against 0 of 400 of revision old"
    times = compare(LIMITS, counts(120, 0, {0.2: 75, 9.0: 45}), old(p90=0.25))
    assert times is not None
    assert times.message == (
        "time to first token above 2.5 s for 45 of 120 requests, against 0.25 s for 9 of 10 of revision old"
    )


def test_equal_revisions_are_not_told_apart_by_chance_however_often_they_are_compared() -> None:
    """A service with many errors of its own: 10 % and one slow request in ten, compared 60 times in each of 100 rollouts."""
    chance = random.Random(33)
    baseline = old(1000, 100, 0.25)
    for _ in range(100):
        requests = failed = slow = 0
        for _ in range(60):
            requests += 20
            failed += sum(chance.random() < 0.1 for _ in range(20))
            slow += sum(chance.random() < 0.1 for _ in range(20))
            candidate = Counts(
                requests, failed, Times({0.25: requests - slow, 2.5: requests - slow, math.inf: requests})
            )
            assert reason(candidate, baseline, max_error_ratio=1) == "", (requests, failed, slow)


def test_a_tally_keeps_pods_that_are_gone_and_servers_that_restarted() -> None:
    tally = Tally()
    tally.record("a", "old", counts(1000, 10, {0.2: 1000}))
    tally.record("b", "old", counts(50))
    tally.record("a", "old", counts(1200, 11, {0.2: 1200}))
    tally.record("c", "new", counts(7))
    total, recent = tally.total("old"), tally.recent("old")
    assert (total.requests, total.failed, total.first_tokens.count) == (1250, 11, 1200)
    assert (recent.requests, recent.failed, recent.first_tokens.count) == (200, 1, 200)
    tally.record("c", "new", counts(3, 1))
    assert (tally.total("new").requests, tally.total("new").failed) == (10, 1)
    assert tally.total("other") == Counts()


def test_pods_with_other_buckets_are_added_where_both_have_a_bound() -> None:
    first, second = Times({1.0: 1, 2.0: 1, math.inf: 1}), Times({2.0: 0, math.inf: 1})
    assert first.plus(second).buckets == {2.0: 1, math.inf: 2}


@pytest.mark.parametrize(
    ("slow", "p90", "limits", "verdict"),
    [
        (600, 0.02, {}, "SlowTokens"),
        (200, 0.02, {}, ""),
        (600, 0.5, {}, ""),
        (600, None, {}, ""),
        (600, 0.02, {"max_itl_increase_milliseconds": 600_000}, ""),
        (600, 0.2, {"max_itl_increase_milliseconds": 0, "max_itl_ratio": 9}, ""),
        (600, 0.02, {"min_requests": 200}, ""),
    ],
    ids=["slow", "two in ten may be", "below the ratio", "unknown", "off", "a higher ratio", "few requests"],
)
def test_times_between_tokens(slow: int, p90: float | None, limits: dict[str, int], verdict: str) -> None:
    times = Times({0.025: 1000 - slow, 0.25: 1000 - slow, 1.0: 1000 - slow, 2.5: 1000, math.inf: 1000})
    baseline = Figures("old", 400, 0, None, p90)
    assert reason(Counts(150, 0, Times(), times), baseline, **limits) == verdict


ROLLING = Analysis("RollingOut", Figures("new"), Figures("old"))
OBSERVED = msgspec.structs.replace(ROLLING, phase="Observing", until="2026-01-01T00:10:00Z")
BOTH = frozenset({"old", "new"})


def step(before: Analysis | None, at: Situation, now: str = NOW, *, enabled: bool = True) -> Analysis | None:
    return advance(before, at, enabled=enabled, observation_seconds=600, now=now)


def test_an_analysis_goes_from_the_rollout_through_the_observation_to_its_end() -> None:
    assert step(None, Situation("new", "", frozenset({"new"}))) is None, "the first revision has no baseline"
    assert step(None, Situation("new", "new", BOTH)) is None, "nothing is rolled out"
    rolling = Situation("new", "old", BOTH)
    assert step(None, rolling) == ROLLING
    assert step(ROLLING, rolling) is ROLLING
    done = Situation("new", "new", BOTH)
    assert step(ROLLING, done) == OBSERVED
    assert step(OBSERVED, done, "2026-01-01T00:09:59Z") is OBSERVED
    passed = step(OBSERVED, done, "2026-01-01T00:10:00Z")
    assert passed is not None and (passed.phase, passed.active) == ("Passed", False)
    assert step(passed, done) is passed
    assert step(passed, Situation("next", "new", BOTH | {"next"})) == Analysis(
        "RollingOut", Figures("next"), Figures("new")
    )


@pytest.mark.parametrize(
    ("at", "enabled", "phase"),
    [
        (Situation("new", "new", BOTH, failed=True), True, "Failed"),
        (Situation("new", "new", BOTH), False, "Stopped"),
        (Situation("new", "new", frozenset({"new"})), True, "Stopped"),
        (Situation("old", "new", BOTH), True, "RollingOut"),
        (Situation("other", "", BOTH), True, "Stopped"),
    ],
    ids=["rolled back", "turned off", "nothing to return to", "undone", "the status is lost"],
)
def test_an_analysis_ends_early(at: Situation, enabled: bool, phase: str) -> None:
    found = step(OBSERVED, at, enabled=enabled)
    assert found is not None and found.phase == phase


def test_a_revision_that_failed_is_compared_again_when_it_is_tried_again() -> None:
    failed = msgspec.structs.replace(OBSERVED, phase="Failed")
    assert step(failed, Situation("new", "old", BOTH, failed=True)) is failed
    assert step(failed, Situation("new", "old", BOTH)) == ROLLING


def measured(analysis: Analysis, tally: Tally, *, from_the_start: bool = True) -> Analysis:
    return measure(analysis, tally, 100, from_the_start=from_the_start)


def test_the_baseline_is_what_the_old_pods_serve_beside_the_new_ones() -> None:
    """A revision that is rolled out because the old one is overloaded is compared with the overload."""
    tally = Tally()
    tally.record("a", "old", counts(10_000, 0, {0.2: 10_000}))
    begun = measured(ROLLING, tally)
    assert begun.baseline == Figures("old", 10_000, 0, 0.25)
    tally.record("a", "old", counts(10_099, 50, {0.2: 10_000, 9.0: 99}))
    assert measured(begun, tally) == begun, "nothing is written before the new revision serves"
    tally.record("b", "new", counts(20, 1, {0.2: 20}))
    served = measured(begun, tally)
    assert served.baseline.requests == 10_099, "too few since the rollout began"
    assert served.candidate == Figures("new", 20, 1)
    tally.record("a", "old", counts(10_100, 50, {0.2: 10_000, 9.0: 100}))
    assert measured(served, tally).baseline == Figures("old", 100, 50, 10.0)


def test_a_new_leader_goes_on_with_the_figures_of_the_old_pods() -> None:
    known = msgspec.structs.replace(OBSERVED, baseline=old(400, 0, 0.25), candidate=Figures("new", 50, 5))
    assert measured(known, Tally(), from_the_start=False) == known
    tally = Tally()
    tally.record("a", "old", counts(150, 15))
    assert measured(known, tally, from_the_start=False).baseline == known.baseline
    scarce = msgspec.structs.replace(known, baseline=old(20))
    assert measured(scarce, tally, from_the_start=False).baseline == old(150, 15)
