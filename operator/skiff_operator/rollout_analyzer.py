"""Reads the metrics of the pods of both revisions while a rollout with `autoRollback` is under way or under observation.

Nothing is read at any other time. Reading goes on in the background, so that pods that do not answer delay no reconcile;
only before the write that begins a rollout are the old pods awaited, because in a rollout that replaces pods in place
they may be gone a moment later.

What the pods of the old revision have counted goes with them. It is kept in two places: in this process as it was read,
and in `status.analysis` as the few figures that the comparison needs. A new leader goes on with those, and shows them.
"""

import asyncio
import time
from typing import Final

import msgspec

from skiff_operator import rollout_analysis
from skiff_operator.cache import Entry
from skiff_operator.pod_metrics import read_metrics
from skiff_operator.rollout_analysis import Analysis, Situation, Tally, Verdict
from skiff_operator.settings import Settings
from skiff_operator.spec import RolloutAnalysis
from skiff_operator.workload import PodState
from skiff_operator.workqueue import Key

_MAX_PODS: Final = 64
"""Pods of each revision that are read; their requests are a sample of all."""
_CONCURRENT: Final = 8


class _Reading(msgspec.Struct):
    """The readings of one service. `began` is the baseline's revision if its pods were read from the rollout's start.

    `suspicion` is the first verdict on `candidate`, which a later reading must confirm.
    """

    tally: Tally
    candidate: str = ""
    began: str = ""
    read_at: float = 0.0
    suspicion: Verdict | None = None
    task: asyncio.Task[None] | None = None


class RolloutAnalyzer:
    """Keeps the analysis of each service whose rollout must be compared with the revision before it."""

    def __init__(self, settings: Settings) -> None:
        """Read as often as `settings` say."""
        self._seconds = settings.rollout_metrics_seconds
        self._readings: dict[Key, _Reading] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT)

    def analyze(self, key: Key, entry: Entry, now: str) -> Verdict | None:
        """Update the analysis of a service's rollout, and return in which way the new revision is worse.

        A verdict counts once a later reading agrees with it and shows more such requests: a single event that ended many
        requests at once is no property of the revision.
        """
        analysis = _advance(entry, now)
        entry.analysis = analysis
        if analysis is None or not analysis.active or entry.service is None:
            self.forget(key)
            return None
        reading = self._readings.setdefault(key, _Reading(Tally()))
        if not entry.service.spec.rollout.paused:
            self._read_if_due(reading, entry, analysis)
        limits = entry.service.spec.rollout.analysis
        from_the_start = reading.began == analysis.baseline.revision
        analysis = rollout_analysis.measure(
            analysis, reading.tally, limits.min_requests, from_the_start=from_the_start
        )
        entry.analysis = analysis
        return _judge(reading, limits, analysis)

    async def begin(self, key: Key, entry: Entry) -> None:
        """Read the pods of the old revision before the rollout begins; without an answer it begins all the same."""
        analysis = entry.analysis
        reading = self._readings.get(key)
        if analysis is None or reading is None or reading.began == analysis.baseline.revision:
            return
        reading.began = analysis.baseline.revision
        await self._read(reading, _pods(entry, analysis.baseline.revision))

    def suspects(self, key: Key) -> bool:
        """Return whether the last reading alone found the new revision worse."""
        reading = self._readings.get(key)
        return reading is not None and reading.suspicion is not None

    def forget(self, key: Key) -> None:
        """Stop reading the pods of a service."""
        reading = self._readings.pop(key, None)
        if reading is not None and reading.task is not None:
            reading.task.cancel()

    async def close(self) -> None:
        """Cancel what is still being read."""
        tasks = [reading.task for reading in self._readings.values() if reading.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _read_if_due(self, reading: _Reading, entry: Entry, analysis: Analysis) -> None:
        """Read the pods of both revisions in the background, unless they were read a short while ago."""
        running = reading.task is not None and not reading.task.done()
        if running or time.monotonic() - reading.read_at < self._seconds:
            return
        pods = [
            *_pods(entry, analysis.baseline.revision),
            *_pods(entry, analysis.candidate.revision),
        ]
        if pods:
            reading.read_at = time.monotonic()
            reading.task = asyncio.create_task(self._read(reading, pods))

    async def _read(self, reading: _Reading, pods: list[PodState]) -> None:
        async with self._slots:
            found = await read_metrics([pod.ip for pod in pods], rollout_analysis.read)
        for pod, counts in zip(pods, found, strict=True):
            if counts is not None:
                reading.tally.record(pod.uid, pod.revision, counts)


def _advance(entry: Entry, now: str) -> Analysis | None:
    """Begin, continue or end the analysis of a service's rollout."""
    service, before = entry.service, entry.last_analysis
    target = entry.desired.target if entry.desired else None
    if service is None or target is None or entry.status is None:
        return before
    policy = service.spec.rollout
    situation = Situation(
        candidate=target.revision,
        current=entry.status.current_revision,
        sound=frozenset(each.revision for each in entry.own_revisions() if not each.failed),
        failed=bool(target.failed),
    )
    return rollout_analysis.advance(
        before,
        situation,
        enabled=policy.rolls_back and policy.analysis.enabled,
        observation_seconds=policy.analysis.observation_seconds,
        now=now,
    )


def _pods(entry: Entry, revision: str) -> list[PodState]:
    """Return the pods of a revision that are read."""
    serving = [pod for pod in entry.pods.values() if pod.revision == revision and pod.ip]
    return sorted(serving, key=lambda pod: pod.name)[:_MAX_PODS]


def _judge(reading: _Reading, limits: RolloutAnalysis, analysis: Analysis) -> Verdict | None:
    """Compare the revisions; return a verdict that an earlier reading suggested."""
    if reading.candidate != analysis.candidate.revision:
        reading.candidate, reading.suspicion = analysis.candidate.revision, None
    counts = reading.tally.total(reading.candidate)
    found, first = rollout_analysis.compare(limits, counts, analysis.baseline), reading.suspicion
    if found is None or first is None or found.reason != first.reason:
        reading.suspicion = found
        return None
    return found if found.evidence > first.evidence else None
