"""Rollout analysis: the comparison of a new revision with the old one by what their requests met. Pure.

A revision may start, become ready, and yet serve badly: requests fail by an error of the server, or wait long for their
first token. Both revisions count this in their own metrics. The new one (the candidate) is worse than the old one (the
baseline) only where three things hold at the same time: it exceeds an absolute floor, it exceeds a multiple of the
baseline, and neither is by chance. The last is judged by Wilson's score interval of a proportion at three standard
deviations, which stays within 0 and 1 and is sound for few requests and for a rate near 0. The intervals are wide because
the comparison is repeated at each reading, and each repetition is another opportunity for chance.

Times to first token are compared as a proportion, too: that of the candidate's requests that took longer than a limit
derived from the baseline's 90th percentile. Of the baseline's own requests, one in ten took longer than that percentile;
of the candidate's, two in ten must certainly have, which leaves room for the percentile being an estimate itself. A mean
would depend on single requests, such as the first of a cold server. Times between tokens are compared in the same way; their
tokens are not independent of each other, which the wide intervals and the second reading must make up for.
"""

import datetime
import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from skiff_operator.metrics_page import samples
from skiff_operator.spec import RolloutAnalysis
from skiff_runtime import contract

ROLLING_OUT: Final = "RollingOut"
OBSERVING: Final = "Observing"
PASSED: Final = "Passed"
FAILED: Final = "Failed"
STOPPED: Final = "Stopped"

STANDARD_DEVIATIONS: Final = 3.0
QUANTILE: Final = 0.9
"""The quantile of the baseline's times to first token from which the candidate's limit is derived."""
_SLOW_SHARE: Final = 2 * (1 - QUANTILE)

_REQUESTS: Final = f"{contract.METRIC_REQUESTS}{{"
_FINISHED: Final = 'outcome="finished"'
_FAILED: Final = 'outcome="failed"'
_BUCKET: Final = re.compile(rf'({contract.METRIC_TTFT}|{contract.METRIC_ITL})_bucket{{le="([^"]+)"}}')
_MAX_COUNT: Final = 1e12
_MAX_BUCKETS: Final = 64
_MAX_PODS: Final = 1024


class Times(msgspec.Struct, frozen=True):
    """A histogram of times: `buckets` are cumulative counts by upper bounds in seconds; the last bound is infinity."""

    buckets: Mapping[float, int] = {}

    @property
    def count(self) -> int:
        """The number of times."""
        return self.buckets.get(math.inf, 0)

    def plus(self, other: "Times", sign: int = 1) -> "Times":
        """Return the sum, or with `sign` -1 the difference, over the buckets that both have."""
        if not other.buckets or not self.buckets:
            return self if self.buckets or sign < 0 else other
        bounds = [bound for bound in self.buckets if bound in other.buckets]
        return Times({bound: self.buckets[bound] + sign * other.buckets[bound] for bound in bounds})

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket that contains this quantile."""
        needed = share * self.count
        return min((bound for bound, count in self.buckets.items() if count >= needed), default=math.inf)

    def slower(self, seconds: float) -> tuple[int, float]:
        """Return the number of times that exceed the first bound from `seconds` on, and that bound."""
        bound = min((each for each in self.buckets if each >= seconds), default=math.inf)
        return self.count - self.buckets.get(bound, 0), bound


class Counts(msgspec.Struct, frozen=True):
    """Counts of one server or of several.

    `requests` ended with a response or with an error of the server, and `failed` of them with an error: neither a request
    that was rejected (4xx) nor one that its client gave up is counted. `first_tokens` are the requests' times to first
    token, and `inter_tokens` the times between tokens.
    """

    requests: int = 0
    failed: int = 0
    first_tokens: Times = Times()
    inter_tokens: Times = Times()

    def plus(self, other: "Counts", sign: int = 1) -> "Counts":
        """Return the sum, or with `sign` -1 the difference."""
        return Counts(
            self.requests + sign * other.requests,
            self.failed + sign * other.failed,
            self.first_tokens.plus(other.first_tokens, sign),
            self.inter_tokens.plus(other.inter_tokens, sign),
        )

    def precedes(self, later: "Counts") -> bool:
        """Return whether one server may have counted these before `later`: counters never fall unless it restarts."""
        return all(a <= b for a, b in zip(self._counters(), later._counters(), strict=True))

    def _counters(self) -> tuple[int, ...]:
        return self.requests, self.failed, self.first_tokens.count, self.inter_tokens.count


def read(page: str) -> Counts | None:
    """Read the counts from a server's page of metrics; None if it counts no requests."""
    finished = failed = 0
    times: dict[str, dict[float, int]] = {contract.METRIC_TTFT: {}, contract.METRIC_ITL: {}}
    known = False
    for series, value in samples(page):
        count = int(min(value, _MAX_COUNT))
        if series.startswith(_REQUESTS):
            known = True
            finished += count if _FINISHED in series else 0
            failed += count if _FAILED in series else 0
        elif (bucket := _BUCKET.fullmatch(series)) and len(times[bucket[1]]) < _MAX_BUCKETS:
            bound = _bound(bucket[2])
            if bound is not None:
                times[bucket[1]][bound] = count
    if not known:
        return None
    first_tokens, inter_tokens = (Times(buckets) for buckets in times.values())
    return Counts(finished + failed, failed, first_tokens, inter_tokens)


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if bound > 0 else None


class _Server(msgspec.Struct):
    """The counts of one pod: `first` as they were read first, `last` the last ones, and those of servers that ended before."""

    revision: str
    first: Counts
    last: Counts
    ended: Counts = Counts()


class Tally:
    """The counts of the pods of both revisions. Those of a pod that is gone are kept."""

    def __init__(self) -> None:
        """Begin without pods."""
        self._servers: dict[str, _Server] = {}

    def record(self, uid: str, revision: str, counts: Counts) -> None:
        """Record the counts of a pod; where they are smaller than before, its server was restarted."""
        known = self._servers.get(uid)
        if known is None:
            if len(self._servers) < _MAX_PODS:
                self._servers[uid] = _Server(revision, counts, counts)
            return
        if not known.last.precedes(counts):
            known.ended = known.ended.plus(known.last)
        known.last = counts

    def total(self, revision: str) -> Counts:
        """Return all that the pods of a revision have counted since their start."""
        return self._sum(revision, recent=False)

    def recent(self, revision: str) -> Counts:
        """Return the part of it that was counted since each pod was read first."""
        return self._sum(revision, recent=True)

    def _sum(self, revision: str, *, recent: bool) -> Counts:
        result = Counts()
        for each in self._servers.values():
            if each.revision == revision:
                counts = each.ended.plus(each.last)
                result = result.plus(counts.plus(each.first, -1) if recent else counts)
        return result


class Figures(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The figures of one revision: requests, those that failed, and the 90th percentiles of TTFT and of ITL.

    A percentile is the upper bound of its bucket; None where too few requests or no bound are known.
    """

    revision: str
    requests: int = 0
    failed_requests: int = 0
    ttft_p90_seconds: float | None = None
    itl_p90_seconds: float | None = None


class Analysis(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The comparison of a revision with the one before it, as the status shows it.

    `until`: the time (RFC 3339) at which the observation ends; empty until all pods are of the new revision.
    """

    phase: str
    candidate: Figures
    baseline: Figures
    until: str = ""

    @property
    def active(self) -> bool:
        """Return whether the comparison goes on."""
        return self.phase in (ROLLING_OUT, OBSERVING)


class Situation(NamedTuple):
    """The state of a rollout: the revision in force, the last one that was Ready, and those that have not failed."""

    candidate: str
    current: str
    sound: frozenset[str]
    failed: bool = False


def advance(
    before: Analysis | None, at: Situation, *, enabled: bool, observation_seconds: int, now: str
) -> Analysis | None:
    """Return the analysis of the present rollout: begun, continued or ended."""
    ours = before is not None and before.candidate.revision == at.candidate
    if before is not None and before.active and (at.failed or not enabled):
        return msgspec.structs.replace(before, phase=FAILED if at.failed and ours else STOPPED)
    if at.failed or not enabled:
        return before
    if at.current not in ("", at.candidate) and at.current in at.sound:
        if before is not None and ours and before.active and before.baseline.revision == at.current:
            return before
        return Analysis(ROLLING_OUT, Figures(at.candidate), Figures(at.current))
    if before is None or not before.active:
        return before
    if not ours or at.current != at.candidate or before.baseline.revision not in at.sound:
        return msgspec.structs.replace(before, phase=STOPPED)
    clock = datetime.datetime.fromisoformat(now)
    if before.phase == ROLLING_OUT:
        end = clock + datetime.timedelta(seconds=observation_seconds)
        until = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        return msgspec.structs.replace(before, phase=OBSERVING, until=until)
    if clock >= datetime.datetime.fromisoformat(before.until):
        return msgspec.structs.replace(before, phase=PASSED)
    return before


def measure(analysis: Analysis, tally: Tally, min_requests: int, *, from_the_start: bool) -> Analysis:
    """Return the analysis with the figures of `tally`.

    The baseline is what the old revision served since the rollout began, because load and prompts were then as they are
    now, and all that its pods have ever served where that is less than `min_requests`. A process that has not read the
    old pods `from_the_start` may have missed some, so it keeps the figures of the process before it, if those suffice.
    Until the new revision has served something, sufficient figures stay as they are, because each change is a write.
    """
    baseline, known = analysis.baseline, analysis.baseline.requests
    counts = tally.total(analysis.candidate.revision)
    recent, total = tally.recent(baseline.revision), tally.total(baseline.revision)
    scarce = known < min(min_requests, total.requests)
    if scarce or (from_the_start and counts.requests):
        requests = recent if recent.requests >= min_requests else total
        timed = recent if recent.first_tokens.count >= min_requests else total
        baseline = _figures(baseline.revision, requests, timed, min_requests)
    candidate = analysis.candidate
    if counts.requests:
        candidate = _figures(candidate.revision, counts, counts, min_requests)
    return msgspec.structs.replace(analysis, candidate=candidate, baseline=baseline)


def _figures(revision: str, requests: Counts, timed: Counts, min_requests: int) -> Figures:
    percentiles = (_percentile(times, min_requests) for times in (timed.first_tokens, timed.inter_tokens))
    return Figures(revision, requests.requests, requests.failed, *percentiles)


def _percentile(times: Times, min_count: int) -> float | None:
    value = times.quantile(QUANTILE) if times.count >= min_count else math.inf
    return value if math.isfinite(value) else None


class Verdict(NamedTuple):
    """The way in which the candidate is worse: `evidence` is the number of its requests that failed, or were too slow."""

    reason: str
    message: str
    evidence: int


def compare(limits: RolloutAnalysis, candidate: Counts, baseline: Figures) -> Verdict | None:
    """Return in which way the candidate is worse than the baseline; None if it is not, or if that is not certain."""
    return (
        _compare_errors(limits, candidate, baseline)
        or _compare_ttft(limits, candidate, baseline)
        or _compare_itl(limits, candidate, baseline)
    )


def _compare_errors(limits: RolloutAnalysis, candidate: Counts, baseline: Figures) -> Verdict | None:
    if candidate.requests < limits.min_requests:
        return None
    certain, _ = wilson_interval(candidate.failed, candidate.requests)
    _, possible = wilson_interval(baseline.failed_requests, baseline.requests)
    before = baseline.failed_requests / baseline.requests if baseline.requests else 1.0
    rate = candidate.failed / candidate.requests
    if (
        certain <= limits.max_error_percent / 100
        or certain <= possible
        or rate <= limits.max_error_ratio * before
    ):
        return None
    figures = (
        f"error rate {candidate.failed} of {candidate.requests} "
        f"against {baseline.failed_requests} of {baseline.requests} of revision {baseline.revision}"
    )
    return Verdict("ErrorRate", figures, candidate.failed)


def _compare_ttft(limits: RolloutAnalysis, candidate: Counts, baseline: Figures) -> Verdict | None:
    return _compare_times(
        candidate.first_tokens,
        baseline.ttft_p90_seconds,
        reason="SlowFirstToken",
        figure="time to first token above {bound:g} s for {slow} of {count} requests",
        revision=baseline.revision,
        increase_seconds=limits.max_ttft_increase_milliseconds / 1000,
        ratio=limits.max_ttft_ratio,
        min_count=limits.min_requests,
    )


def _compare_itl(limits: RolloutAnalysis, candidate: Counts, baseline: Figures) -> Verdict | None:
    if candidate.requests < limits.min_requests:
        return None
    return _compare_times(
        candidate.inter_tokens,
        baseline.itl_p90_seconds,
        reason="SlowTokens",
        figure="inter-token latency above {bound:g} s for {slow} of {count} tokens",
        revision=baseline.revision,
        increase_seconds=limits.max_itl_increase_milliseconds / 1000,
        ratio=limits.max_itl_ratio,
        min_count=limits.min_requests,
    )


def _compare_times(
    times: Times,
    before: float | None,
    *,
    reason: str,
    figure: str,
    revision: str,
    increase_seconds: float,
    ratio: int,
    min_count: int,
) -> Verdict | None:
    """Return a verdict if too many of the candidate's times certainly exceed the limit.

    `before`: the 90th percentile of the baseline, which has this `revision`; `figure`: the text about the candidate.
    """
    if before is None or times.count < min_count:
        return None
    slow, bound = times.slower(max(ratio * before, before + increase_seconds))
    certain, _ = wilson_interval(slow, times.count)
    if certain <= _SLOW_SHARE:
        return None
    found = figure.format(bound=bound, slow=slow, count=times.count)
    return Verdict(reason, f"{found}, against {before:g} s for 9 of 10 of revision {revision}", slow)


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion at `STANDARD_DEVIATIONS`; all of 0 to 1 without trials.

    A page of metrics that contradicts itself may have more hits than trials, which count as all of them.
    """
    if trials <= 0:
        return 0.0, 1.0
    z2, share = STANDARD_DEVIATIONS**2, min(max(hits / trials, 0.0), 1.0)
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    half = STANDARD_DEVIATIONS * spread / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
