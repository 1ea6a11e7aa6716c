"""Limits of API keys: buckets that refill, debts of tokens, concurrency, and the file that sets them."""

import json
import random
from pathlib import Path

import pytest

from skiff_router.limits import Admission, KeyLimits, Limits, RateLimited, RateLimiter, read_limits
from skiff_runtime.errors import ConfigError


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limiter(clock: Clock, **limits: int | None) -> RateLimiter:
    return RateLimiter(Limits(KeyLimits(**limits)), clock)


def refused(limiter: RateLimiter, name: str = "a") -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limiter.admit(name, 0)
    return caught.value


def test_requests_a_minute_are_refilled_steadily(clock: Clock) -> None:
    limits = limiter(clock, requests_per_minute=6)
    for _ in range(6):
        limits.admit("a", 0).end(0)
    error = refused(limits)
    assert (error.status, error.limit, error.retry_after_seconds) == (429, "requestsPerMinute", 10)
    assert "'a' has used its 6 requests a minute; retry in 10 s" in error.message
    limits.admit("b", 0)  # another key has its own
    clock.now += 9.5
    assert refused(limits).retry_after_seconds == 1
    clock.now += 0.5
    limits.admit("a", 0)
    refused(limits)
    clock.now += 3600
    for _ in range(6):  # no more than a minute's amount is saved
        limits.admit("a", 0)
    refused(limits)


def test_tokens_are_estimated_first_and_settled_at_the_end(clock: Clock) -> None:
    limits = limiter(clock, tokens_per_minute=600)
    first, second = limits.admit("a", 500), limits.admit("a", 99)
    assert limits.admit("a", 0)
    first.end(100)  # 400 less than estimated
    second.end(1299)  # 1,200 more: a debt
    error = refused(limits)
    assert (error.limit, error.retry_after_seconds) == ("tokensPerMinute", 80)
    clock.now += 79.9
    refused(limits)
    clock.now += 0.2
    limits.admit("a", 10**6)  # however large, it is served, and delays what follows
    assert refused(limits).retry_after_seconds > 60_000


def test_tokens_are_charged_when_their_request_ends(clock: Clock) -> None:
    """Not when it began: an idle key has a minute's amount, and no more."""
    limits = limiter(clock, tokens_per_minute=600)
    running = limits.admit("a", 0)
    clock.now += 600
    running.end(600)
    assert refused(limits).retry_after_seconds == 1


def test_concurrency_is_freed_once(clock: Clock) -> None:
    limits = limiter(clock, concurrency=2)
    first, _ = limits.admit("a", 0), limits.admit("a", 0)
    error = refused(limits)
    assert (error.limit, error.retry_after_seconds) == ("concurrency", 1)
    for _ in range(3):
        first.end(0)
    assert limits.in_flight() == {"a": 1}
    limits.admit("a", 0)
    refused(limits)


def test_refused_request_takes_nothing(clock: Clock) -> None:
    limits = limiter(clock, requests_per_minute=2, concurrency=1)
    running = limits.admit("a", 0)
    for _ in range(5):
        assert refused(limits).limit == "concurrency"
    running.end(0)
    limits.admit("a", 0)


def test_changed_limits_keep_what_was_used(clock: Clock) -> None:
    limits = limiter(clock, requests_per_minute=4, concurrency=2)
    for _ in range(2):
        limits.admit("a", 0)
    limits.replace(Limits(KeyLimits(requests_per_minute=2)))
    for _ in range(2):
        limits.admit("a", 0)
    assert refused(limits).limit == "requestsPerMinute"
    limits.replace(Limits(KeyLimits(), {"a": KeyLimits(concurrency=4)}))
    assert refused(limits).limit == "concurrency"
    limits.replace(Limits())
    limits.admit("a", 0)


def test_name_without_a_key_is_forgotten_when_its_requests_have_ended(clock: Clock) -> None:
    limits = limiter(clock)
    running = limits.admit("old", 0)
    limits.admit("a", 0)
    limits.keep_only({"a"})
    assert limits.in_flight() == {"a": 1, "old": 1}
    running.end(0)
    limits.keep_only({"a"})
    assert limits.in_flight() == {"a": 1}


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_stay_within_the_limits(clock: Clock, seed: int) -> None:
    """Requests that have ended used no more than the amount, what was refilled, and the last requests' own tokens."""
    choose = random.Random(seed)
    limits = limiter(clock, requests_per_minute=120, tokens_per_minute=6000, concurrency=5)
    running: list[Admission] = []
    began, admitted, used, largest = clock.now, 0, 0, 400
    for _ in range(2000):
        clock.now += choose.expovariate(4)
        if running and choose.random() < 0.6:
            tokens = choose.randrange(largest)
            running.pop(choose.randrange(len(running))).end(tokens)
            used += tokens
        try:
            running.append(limits.admit("a", choose.randrange(100)))
            admitted += 1
        except RateLimited as error:
            assert error.retry_after_seconds >= 1
        assert limits.in_flight() == {"a": len(running)}
        assert len(running) <= 5
        minutes = (clock.now - began) / 60
        assert admitted <= 120 * (1 + minutes) + 1e-6
        assert used <= 6000 * (1 + minutes) + 5 * largest


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_file_has_a_default_and_limits_by_name(tmp_path: Path) -> None:
    limits = read_limits(
        write(
            tmp_path / "limits",
            {
                "default": {"requestsPerMinute": 60, "concurrency": 4},
                "keys": {"team-a": {"tokensPerMinute": 1000, "concurrency": None}, "team-b": {}},
            },
        ),
        "--limits-file",
    )
    assert limits.of("team-a") == KeyLimits(60, 1000, None)
    assert limits.of("team-b") == limits.of("other") == limits.default
    assert read_limits(write(tmp_path / "empty", {}), "--limits-file") == Limits()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--limits-file .*truncated"),
        ({"defaults": {}}, "unknown field `defaults`"),
        ({"default": {"requestsPerHour": 1}}, "'default': .*unknown field `requestsPerHour`"),
        ({"default": {"concurrency": 0}}, "'default': .*>= 1 - at `\\$.concurrency`"),
        ({"keys": {"team-a": {"tokensPerMinute": "10"}}}, "'keys.team-a': .*`\\$.tokensPerMinute`"),
        ({"keys": {"team-a": 7}}, "'keys.team-a': Expected `object`"),
        ({"keys": {f"k{number}": {} for number in range(257)}}, "at most 256"),
        (" " * (1 << 21), "more than"),
        ('{"keys": {"a": ' + "[" * 100_000, "--limits-file"),
    ],
)
def test_invalid_file_is_refused_by_name(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_limits(write(tmp_path / "limits", content), "--limits-file")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_limits(str(tmp_path / "none"), "--limits-file")
