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
    limits.set_names({"a"})
    assert limits.in_flight() == {"a": 1, "old": 1}
    running.end(0)
    limits.set_names({"a"})
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


class Routers:
    """Limiters of routers that tell each other what their requests use whenever the test says so."""

    def __init__(self, clock: Clock, count: int, **limits: int | None) -> None:
        self.limiters = [limiter(clock, **limits) for _ in range(count)]
        self._known = {
            (reader, peer): -1 for reader in range(count) for peer in range(count) if reader != peer
        }
        for each in self.limiters:
            each.set_names({"a", "b"})
        self.exchange()

    def exchange(self) -> None:
        for reader, peer in self._known:
            self.read(reader, peer)

    def read(self, reader: int, peer: int) -> None:
        told = self.limiters[peer]
        self.limiters[reader].record_peer(str(peer), told.read_usage(self._known[reader, peer]))
        self._known[reader, peer] = told.version


def test_routers_share_the_limits(clock: Clock) -> None:
    routers = Routers(clock, 3, requests_per_minute=6, tokens_per_minute=600, concurrency=4)
    one, two, three = routers.limiters
    first, second = one.admit("a", 100), two.admit("a", 100)
    routers.exchange()
    three.admit("a", 50)
    routers.exchange()
    one.admit("a", 0)
    routers.exchange()
    for each in routers.limiters:
        error = refused(each)
        assert error.limit == "concurrency" and "has 4 requests in progress" in error.message
    first.end(600)
    second.end(0)
    routers.exchange()
    for each in routers.limiters:  # 600 + 0 + 50: a debt of 50, which is paid after 5 s, and a token more
        assert (refused(each).limit, refused(each).retry_after_seconds) == ("tokensPerMinute", 6)
    clock.now += 5.2
    three.admit("a", 0)
    two.admit("a", 0)
    routers.exchange()
    assert {refused(each).limit for each in routers.limiters} == {"concurrency"}


def test_new_router_takes_over_what_is_left(clock: Clock) -> None:
    old, new = limiter(clock, requests_per_minute=6), limiter(clock, requests_per_minute=6)
    for _ in range(5):
        old.admit("a", 0)
    new.record_peer("old", old.read_usage(-1))
    old.record_peer("new", new.read_usage(-1))
    version = new.version
    new.admit("a", 0)
    refused(new)
    old.record_peer("new", new.read_usage(version))
    refused(old)


def test_name_that_was_forgotten_meanwhile_takes_no_old_sum(clock: Clock) -> None:
    """A key that was removed from the file of one router and is there again, while the other one has counted for days."""
    old, new = limiter(clock, requests_per_minute=6), limiter(clock, requests_per_minute=6)
    new.record_peer("old", old.read_usage(-1))
    for _ in range(600):
        old.admit("a", 0).end(0)
        clock.now += 10
    new.record_peer("old", old.read_usage(0))
    new.set_names(())
    version = old.version
    old.admit("a", 0).end(0)
    new.record_peer("old", old.read_usage(version))
    for _ in range(5):
        new.admit("a", 0)
    refused(new)


def test_name_that_a_peer_has_forgotten_meanwhile_gives_nothing_back(clock: Clock) -> None:
    """A key that was removed and added again counts from 0 at the peer, but stays known where a request of it runs."""
    old, new = limiter(clock, requests_per_minute=6), limiter(clock, requests_per_minute=6)
    for _ in range(5):
        old.admit("a", 0).end(0)
    new.record_peer("old", old.read_usage(-1))
    new.admit("a", 0)
    old.set_names(())
    version = old.version
    old.set_names({"a"})
    new.record_peer("old", old.read_usage(version))
    refused(new)


def test_router_that_was_out_of_reach_is_counted_when_it_answers_again(clock: Clock) -> None:
    routers = Routers(clock, 2, requests_per_minute=6, concurrency=2)
    one, two = routers.limiters
    running = [two.admit("a", 0), two.admit("a", 0)]
    routers.exchange()
    assert refused(one).limit == "concurrency"
    one.end_peer_requests("1")
    one.admit("a", 0).end(0)
    running[0].end(0)
    two.admit("a", 0).end(0)
    routers.exchange()
    one.admit("a", 0).end(0)  # the fifth; one of the other router runs
    routers.exchange()
    two.admit("a", 0).end(0)
    routers.exchange()
    assert [refused(each).limit for each in routers.limiters] == ["requestsPerMinute"] * 2
    one.forget_peer("1")
    assert refused(one).limit == "requestsPerMinute", "what was taken stays taken"
    clock.now += 60
    for _ in range(2):
        one.admit("a", 0)
    assert refused(one).limit == "concurrency"


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_of_routers_agree_with_one(clock: Clock, seed: int) -> None:
    """Whatever the order of the reports, each router knows all of it when all have read each other's last report."""
    choose = random.Random(seed)
    limits = {"requests_per_minute": 10_000, "tokens_per_minute": 1_000_000, "concurrency": 1000}
    routers, single = Routers(clock, 3, **limits), limiter(clock, **limits)
    running: list[tuple[Admission, Admission]] = []
    for _ in range(300):
        if running and choose.random() < 0.5:
            pair, tokens = running.pop(choose.randrange(len(running))), choose.randrange(400)
            for each in pair:
                each.end(tokens)
        name, estimate = choose.choice("ab"), choose.randrange(200)
        running.append((choose.choice(routers.limiters).admit(name, estimate), single.admit(name, estimate)))
        if choose.random() < 0.4:
            routers.read(*choose.sample(range(3), 2))
    routers.exchange()
    expected = single.read_usage(0)
    for router in routers.limiters:
        found = router.read_usage(0)
        assert {name: (usage.requests_left, usage.tokens_left) for name, usage in found.items()} == {
            name: (usage.requests_left, usage.tokens_left) for name, usage in expected.items()
        }
    assert {
        name: sum(each.in_flight().get(name, 0) for each in routers.limiters) for name in expected
    } == single.in_flight()


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
    assert limits.for_key("team-a") == KeyLimits(60, 1000, None)
    assert limits.for_key("team-b") == limits.for_key("other") == limits.default
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
