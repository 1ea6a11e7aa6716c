"""The autoscaling planner: the number of pods of one service, from the load of its pods. Pure: the time is an argument.

A target is the desired load per pod. The sum of some loads over all pods (requests, KV cache) does not
depend on the number of pods. Divided by the target, it is the number of pods wanted. Queued tokens and times to first
token are no such sums: they are small until the pods are too few, and then they rise steeply. So they demand more pods
in proportion to the excess, but say nothing about fewer pods. For that, the planner remembers the requests of each pod
at which such a target was exceeded, and removes one pod at a time while the rest would stay clear of that.

More pods are wanted at once, and ahead of steady growth by the time that a pod takes to start; pods that start count as if
they served. Fewer pods are wanted late: the largest number that was wanted within the delay counts. Between the two lies a
band in which nothing changes, so that a constant load has a constant number of pods.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from skiff_operator.spec import Autoscaling

TOLERANCE: Final = 1.1
"""Excess over the target, as a factor, at which more pods are wanted."""
HEADROOM: Final = 0.8
"""Share of the target that fewer pods may reach."""
FIRST_PODS: Final = 4
"""The number may always grow to this many pods at once, and beyond to twice those that serve."""
TREND_SECONDS: Final = 60.0
MIN_TREND_SECONDS: Final = 15.0
MIN_GROWTH: Final = 0.05
"""Growth from one third of the trend's time to the next that is no noise, as a share of the load."""
MAX_AHEAD_SECONDS: Final = 600.0
MAX_AHEAD: Final = 2.0
"""Bound on the expected load, as a multiple of the present one."""
EXCESS_SECONDS: Final = 3600.0
"""Time for which the requests of each pod at an exceeded target are remembered: what is requested changes."""
MAX_EXCESS: Final = 4.0
QUIET: Final = 0.5
"""Share of a target that is no sum below which fewer pods may be tried."""


class PodLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one pod that serves. `accepted` counts its requests since its start.

    `kv_usage`: share of the KV cache that running requests occupy. `ttft_seconds`: recent mean time to first token, None
    if no request had one.
    """

    running: float = 0.0
    waiting: float = 0.0
    queued_tokens: float = 0.0
    kv_usage: float = 0.0
    ttft_seconds: float | None = None
    accepted: float = 0.0

    @property
    def requests(self) -> float:
        """Requests that run or wait."""
        return self.running + self.waiting


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one service at `now`, in seconds of a monotonic clock.

    `replicas`: the desired number of pods. `loads`: loads of the serving pods that answered; `silent`, `unread`: numbers
    of serving pods that did not answer, or were not queried. `loading`: starting pods; `failing`: pods that cannot start
    or crash repeatedly. `rolling_out`: pods of two revisions exist. `start_seconds`: startup time of a pod; 0 if unknown.
    """

    now: float
    replicas: int
    loads: tuple[PodLoad, ...] = ()
    silent: int = 0
    unread: int = 0
    loading: int = 0
    failing: int = 0
    rolling_out: bool = False
    start_seconds: float = 0.0

    @property
    def serving(self) -> int:
        """Number of pods that serve."""
        return len(self.loads) + self.silent + self.unread


class Decision(msgspec.Struct, frozen=True):
    """The desired number of pods, and the reason as text."""

    replicas: int
    reason: str


class _Need(msgspec.Struct, frozen=True):
    """The number of pods that one target demands, and why."""

    replicas: int
    reason: str


class Memory:
    """The history of one service that decisions depend on; each part is bounded. It begins anew with each leader."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.active_at = 0.0
        self._replicas = 0
        self._accepted = 0.0
        self._wanted: deque[tuple[float, int]] = deque()
        self._samples: dict[str, deque[tuple[float, float]]] = {}
        self._excess: dict[str, tuple[float, float, float]] = {}

    def observe(self, seen: Observation, delay_seconds: float) -> None:
        """Record the time, the number of pods, and whether the service was used since the last observation.

        A larger number of pods was wanted by someone, so it stays for the delay, too.
        """
        if self.began is None:
            self.began = self.active_at = seen.now
        if seen.replicas > self._replicas:
            self.want(seen.now, seen.replicas, delay_seconds)
        self._replicas = seen.replicas
        accepted = sum(load.accepted for load in seen.loads)
        used = accepted != self._accepted or any(load.requests for load in seen.loads)
        self._accepted = accepted
        if used or not seen.loads:  # what is not ready cannot be idle
            self.active_at = seen.now

    def want(self, now: float, replicas: int, delay_seconds: float) -> int:
        """Record the number that is wanted now; return the largest one of the last `delay_seconds`.

        The deque holds only numbers that no later one reaches, so it is as long as there are different ones at most.
        """
        while self._wanted and self._wanted[-1][1] <= replicas:
            self._wanted.pop()
        self._wanted.append((now, replicas))
        while now - self._wanted[0][0] > delay_seconds:
            self._wanted.popleft()
        return self._wanted[0][1]

    def expect(self, target: str, now: float, total: float, ahead_seconds: float) -> float:
        """Record a total load; return the one that steady growth leads to after `ahead_seconds`, at least the present one."""
        samples = self._samples.setdefault(target, deque())
        samples.append((now, total))
        while now - samples[0][0] > TREND_SECONDS:
            samples.popleft()
        span = now - samples[0][0]
        if span < MIN_TREND_SECONDS or ahead_seconds <= 0:
            return total
        began, third = samples[0][0], span / 3
        parts: tuple[list[float], ...] = ([], [], [])
        for at, value in samples:
            parts[min(2, int((at - began) / third))].append(value)
        if not all(parts):
            return total
        first, second, last = (sum(part) / len(part) for part in parts)
        step = min(second - first, last - second)
        if step <= max(1e-9, MIN_GROWTH * first):
            return total
        grown = total + step / third * min(ahead_seconds, MAX_AHEAD_SECONDS)
        return min(grown, MAX_AHEAD * total)

    def forget_trend(self) -> None:
        """Forget the growth of loads: the pods are gone, or others."""
        self._samples.clear()

    def exceed(self, name: str, target: float, now: float, requests: float) -> None:
        """Record the requests of each pod at which a target is exceeded; a larger number counts little by little."""
        known = self.excess(name, target, now)
        moved = requests if known is None or requests < known else known + 0.1 * (requests - known)
        self._excess[name] = (target, now, moved)

    def excess(self, name: str, target: float, now: float) -> float | None:
        """Return the requests of each pod at which a target was exceeded lately; None if it was not.

        What another target was exceeded at says nothing of this one.
        """
        known_target, at, requests = self._excess.get(name, (target, -math.inf, 0.0))
        return requests if known_target == target and now - at <= EXCESS_SECONDS else None


def decide(policy: Autoscaling, seen: Observation, memory: Memory) -> Decision:
    """Return the desired number of pods, and record the observation in `memory`."""
    memory.observe(seen, policy.scale_down_delay_seconds)
    least, most, now = policy.min_replicas, policy.max_replicas, seen.replicas
    if now > most:
        return Decision(most, f"maxReplicas is {most}")
    if now < least:
        return Decision(least, f"minReplicas is {least}")
    if now == 0:
        memory.forget_trend()
        return Decision(0, "no request has come")
    if not seen.loads:
        memory.forget_trend()
        memory.want(seen.now, now, policy.scale_down_delay_seconds)
        return Decision(now, "no pod has reported its load")
    need = max(_needs(policy, seen, memory), key=lambda each: each.replicas)
    wanted = min(max(need.replicas, least, 1), most)
    limit = max(FIRST_PODS, 2 * seen.serving)
    if wanted > now:
        wanted = max(now, min(wanted, limit))
    stable = memory.want(seen.now, wanted, policy.scale_down_delay_seconds)
    if wanted > now:
        return Decision(wanted, need.reason)
    hold = _reason_to_hold(seen)
    if hold:
        return Decision(now, hold)
    idle = seen.now - memory.active_at
    if least == 0 and idle >= policy.idle_seconds:
        return Decision(0, f"no request for {policy.idle_seconds} s")
    assert memory.began is not None, "it was observed"
    if stable < now and seen.now - memory.began >= policy.scale_down_delay_seconds:
        return Decision(stable, f"{need.reason}; fewer were enough for {policy.scale_down_delay_seconds} s")
    return Decision(now, need.reason)


def _reason_to_hold(seen: Observation) -> str:
    """Return the reason why no pod may be removed now; empty if one may."""
    if seen.loading:
        return f"{_pods(seen.loading)} starting"
    if seen.rolling_out:
        return "a rollout is under way"
    return f"{_pods(seen.silent)} not answering" if seen.silent else ""


def _pods(count: int) -> str:
    return "1 pod is" if count == 1 else f"{count} pods are"


def _needs(policy: Autoscaling, seen: Observation, memory: Memory) -> Sequence[_Need]:
    """Return what each target demands, in the order of the spec."""
    targets, found = policy.targets, []
    if targets.concurrency is not None:
        total = _total(seen, [load.requests for load in seen.loads])
        found.append(_by_sum("concurrency", "requests", total, targets.concurrency, seen, memory))
    if targets.queued_tokens is not None:
        mean = sum(load.queued_tokens for load in seen.loads) / len(seen.loads)
        found.append(_by_excess("queued tokens of a pod", mean, targets.queued_tokens, seen, memory))
    if targets.kv_cache_utilization is not None:
        total = _total(seen, [100 * load.kv_usage for load in seen.loads])
        found.append(
            _by_sum(
                "kvCacheUtilization", "% of a KV cache", total, targets.kv_cache_utilization, seen, memory
            )
        )
    if targets.ttft_seconds is not None:
        times = [load.ttft_seconds for load in seen.loads if load.ttft_seconds is not None]
        mean = sum(times) / len(times) if times else 0.0
        found.append(_by_excess("seconds to the first token", mean, targets.ttft_seconds, seen, memory))
    return found


def _total(seen: Observation, values: Sequence[float]) -> float:
    """Return the sum over all pods that serve; those that do not answer count as the others do."""
    return sum(values) * seen.serving / len(values)


def _by_sum(name: str, unit: str, total: float, target: float, seen: Observation, memory: Memory) -> _Need:
    """Return the need by a load whose sum does not depend on the number of pods."""
    expected = memory.expect(name, seen.now, total, seen.start_seconds)
    reason = f"{total:.0f} {unit}, {target:g} for each pod"
    if expected > total:
        ahead = min(seen.start_seconds, MAX_AHEAD_SECONDS)
        reason = f"{expected:.0f} {unit} expected in {ahead:.0f} s, {total:.0f} now, {target:g} for each pod"
    if expected > TOLERANCE * target * seen.replicas:
        return _Need(_ceil(expected / target), reason)
    return _Need(min(seen.replicas, _ceil(expected / (HEADROOM * target))), reason)


def _by_excess(name: str, mean: float, target: float, seen: Observation, memory: Memory) -> _Need:
    """Return the need by a load that is small until the pods are too few."""
    requests = _total(seen, [load.requests for load in seen.loads])
    reason = f"{mean:.3g} {name}, {target:g} wanted"
    if mean > TOLERANCE * target:
        memory.exceed(name, target, seen.now, requests / seen.serving)
        return _Need(max(seen.replicas, _ceil(seen.serving * min(mean / target, MAX_EXCESS))), reason)
    excess = memory.excess(name, target, seen.now)
    if mean > QUIET * target or seen.replicas < 2:
        return _Need(seen.replicas, reason)
    if excess is not None and requests / (seen.replicas - 1) > HEADROOM * excess:
        return _Need(seen.replicas, f"{reason}; it was exceeded at {excess:.3g} requests of each pod")
    return _Need(seen.replicas - 1, reason)


def _ceil(value: float) -> int:
    """Round up, but not for an error of the last digits."""
    return math.ceil(value - 1e-9)
