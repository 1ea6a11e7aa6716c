"""The queue of InferenceServices to reconcile: one entry per key, never two workers on one key, backing off.

`Schedule` is the pure part: the time is an argument and it never waits. `WorkQueue` lets asyncio workers wait on it.
An entry has a due time and a stage; of the entries that are due, the one with the earliest deadline (due time plus
`STAGE_DEADLINE_SECONDS`) goes first. So under load missing children come before Services and Services before
status, and yet no entry starves behind a stream of more urgent work.

A key that failed backs off: it is due again after 1 s, 2 s, 4 s, up to 5 min. An event about it (`add`) makes it due
at once, for one attempt that neither shortens nor lengthens the backoff; the periodic resync (`refresh`) leaves it
alone. Success ends the backoff, and so does `forget` when the spec changed. A pause that the API server demands
(Retry-After) delays events, too.
"""

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from skiff_operator.kinds import Stage

Key = tuple[str, str]
"""Namespace and name of an InferenceService."""

STAGE_DEADLINE_SECONDS: Final = {Stage.CHILDREN: 0.0, Stage.NETWORK: 20.0, Stage.STATUS: 40.0}
"""Seconds by which an entry of each stage may be overtaken by more urgent ones after it is due."""
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 300.0


@dataclass(slots=True)
class _Entry:
    due: float
    stage: Stage


@dataclass(slots=True)
class _Backoff:
    failures: int
    retry_at: float
    not_before: float


@dataclass
class Schedule:
    """Order of the keys. Times are seconds of one monotonic clock."""

    _waiting: dict[Key, _Entry] = field(default_factory=dict)
    _running: dict[Key, _Entry | None] = field(default_factory=dict)
    _backoffs: dict[Key, _Backoff] = field(default_factory=dict)
    _by_due: list[tuple[float, Key]] = field(default_factory=list)
    _by_deadline: list[tuple[float, Key]] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of waiting keys; keys in progress are not counted."""
        return len(self._waiting)

    def add(self, key: Key, stage: Stage, now: float, delay_seconds: float = 0.0) -> None:
        """Add `key`. A key that is already there keeps one entry, with the earlier time and the more urgent stage."""
        due = now + delay_seconds
        if key in self._backoffs:
            due = max(due, self._backoffs[key].not_before)
        if key in self._running:
            again = self._running[key]
            self._running[key] = _earlier(again, due, stage)
            return
        entry = _earlier(self._waiting.get(key), due, stage)
        if self._waiting.get(key) != entry:
            self._waiting[key] = entry
            heapq.heappush(self._by_due, (entry.due, key))

    def refresh(self, key: Key, stage: Stage, now: float) -> None:
        """Add `key` for a resync, unless it backs off or is in progress."""
        backs_off = key in self._backoffs and key in self._waiting
        if key not in self._running and not backs_off:
            self.add(key, stage, now)

    def forget(self, key: Key) -> None:
        """End the backoff of `key`: an earlier spec failed."""
        self._backoffs.pop(key, None)

    def take(self, now: float) -> Key | None:
        """Return the most urgent key that is due and not in progress; the caller holds it until `finish`."""
        while self._by_due and self._by_due[0][0] <= now:
            due, key = heapq.heappop(self._by_due)
            entry = self._waiting.get(key)
            if entry is not None and entry.due == due:
                heapq.heappush(self._by_deadline, (due + STAGE_DEADLINE_SECONDS[entry.stage], key))
        while self._by_deadline:
            deadline, key = heapq.heappop(self._by_deadline)
            entry = self._waiting.get(key)
            if entry is not None and entry.due + STAGE_DEADLINE_SECONDS[entry.stage] == deadline:
                del self._waiting[key]
                self._running[key] = None
                return key
        return None

    def finish(
        self,
        key: Key,
        now: float,
        *,
        failed: bool = False,
        partial: bool = False,
        retry_after_seconds: float = 0.0,
    ) -> None:
        """Give `key` back. A failed key is due again after its backoff; success ends the backoff.

        `partial`: this attempt succeeded, but the step that failed before may be still ahead, so the backoff stays.
        `retry_after_seconds`: the API server demands this pause, which events do not shorten either.
        """
        again = self._running.pop(key)
        if failed:
            not_before = now + min(retry_after_seconds, LAST_RETRY_SECONDS)
            again = _earlier(again, self._retry_at(key, now, not_before), Stage.CHILDREN)
        elif not partial:
            self.forget(key)
        if again is not None:
            self.add(key, again.stage, again.due)

    def _retry_at(self, key: Key, now: float, not_before: float) -> float:
        """Return when a failed key is due; the backoff grows only by a failure after its time was over."""
        known = self._backoffs.get(key)
        if known is None or now >= known.retry_at:
            failures = 0 if known is None else known.failures
            delay = min(FIRST_RETRY_SECONDS * 2.0 ** min(failures, 20), LAST_RETRY_SECONDS)
            known = self._backoffs[key] = _Backoff(failures + 1, now + delay, not_before)
        known.not_before = max(known.not_before, not_before)
        return max(known.retry_at, not_before)

    def overdue_seconds(self, now: float) -> float:
        """Return for how long the oldest waiting key has been due."""
        return max((now - entry.due for entry in self._waiting.values()), default=0.0)

    def next_due(self) -> float | None:
        """Return when `take` may next return a key, if none is added meanwhile; None when no key waits."""
        if self._by_deadline:
            return -math.inf
        return self._by_due[0][0] if self._by_due else None


class WorkQueue:
    """`Schedule` on the event loop's clock, for any number of workers of one loop.

    An added key wakes one worker, not all of them; a worker that finds more to do wakes the next.
    """

    def __init__(self) -> None:
        """Create an empty queue; it binds to no loop before it is used."""
        self._schedule = Schedule()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._alarm: asyncio.Handle | None = None
        self._alarm_at = math.inf

    def __len__(self) -> int:
        """Return the number of waiting keys."""
        return len(self._schedule)

    def add(self, key: Key, stage: Stage, delay_seconds: float = 0.0) -> None:
        """Add `key`, due in `delay_seconds`."""
        self._schedule.add(key, stage, _now(), delay_seconds)
        self._wake_when_due()

    def refresh(self, key: Key, stage: Stage) -> None:
        """Add `key` for a resync, unless it backs off or is in progress."""
        self._schedule.refresh(key, stage, _now())
        self._wake_when_due()

    def forget(self, key: Key) -> None:
        """End the backoff of `key`."""
        self._schedule.forget(key)

    async def get(self) -> Key:
        """Wait for the next key; give it back with `done`."""
        while (key := self._schedule.take(_now())) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            self._wake_when_due()
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake_when_due()
                raise
        self._wake_when_due()
        return key

    def done(
        self, key: Key, *, failed: bool = False, partial: bool = False, retry_after_seconds: float = 0.0
    ) -> None:
        """Give `key` back; it is due again if it failed or was added meanwhile."""
        self._schedule.finish(
            key, _now(), failed=failed, partial=partial, retry_after_seconds=retry_after_seconds
        )
        self._wake_when_due()

    def overdue_seconds(self) -> float:
        """Return for how long the oldest waiting key has been due."""
        return self._schedule.overdue_seconds(_now())

    def _wake_when_due(self) -> None:
        """Wake one worker if a key is due, else set a timer for the time when one is."""
        due = self._schedule.next_due()
        if due is None:
            return
        if due <= _now():
            self._wake_one()
        elif due < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = due  # kept here: uvloop's handle for a very near time has no `when`
            self._alarm = asyncio.get_running_loop().call_at(due, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _earlier(entry: _Entry | None, due: float, stage: Stage) -> _Entry:
    if entry is None:
        return _Entry(due, stage)
    return _Entry(min(entry.due, due), min(entry.stage, stage))


def _now() -> float:
    return asyncio.get_running_loop().time()
