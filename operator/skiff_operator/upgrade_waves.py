"""Upgrade waves: a few InferenceServices at a time adopt the pod template that this operator builds.

A service keeps its turn until it is Ready with the new template, and until the analysis of its rollout has ended if that
is on. One that fails keeps it for good, so that a bad template stops after the first wave. A new leader reads from the
revisions which services have a turn.
"""

from collections.abc import Callable

from skiff_operator import revisions
from skiff_operator.cache import Cache, Entry
from skiff_operator.settings import Settings
from skiff_operator.status import READY
from skiff_operator.workqueue import Key


class UpgradeWaves:
    """The services that have a turn."""

    def __init__(
        self, cache: Cache, settings: Settings, *, is_complete: Callable[[], bool] = lambda: True
    ) -> None:
        """Admit as many services of `cache` as `settings` allow, once it `is_complete`.

        Before, turns that earlier leaders gave in other namespaces are not known.
        """
        self._is_complete = is_complete
        self._cache = cache
        self._enabled = settings.upgrade_policy == "Waves"
        self._limit = settings.upgrade_max_unavailable
        self._adopting: set[Key] | None = None

    def admit(self, key: Key) -> bool:
        """Return whether a service may adopt the new template now, and give it a turn.

        One that is not Ready has to wait: its pods have trouble enough, and it would hold up the others.
        """
        if not self._enabled or not self._is_complete():
            return False
        if self._adopting is None:
            self._adopting = {each for each in self._cache if self._was_admitted(each)}
        if key in self._adopting:
            return True
        entry = self._cache.get(key)
        if entry is None or not _is_ready(entry):
            return False
        if len(self._adopting) >= self._limit:
            self._adopting = {each for each in self._adopting if not self._is_done(each)}
        if len(self._adopting) >= self._limit:
            return False
        self._adopting.add(key)
        return True

    def _was_admitted(self, key: Key) -> bool:
        """Return whether an earlier leader gave a service a turn, which it still has."""
        entry = self._cache.get(key)
        last = None if entry is None else revisions.newest(entry.own_revisions())
        return (
            entry is not None
            and last is not None
            and last.cause == revisions.WAVE
            and not _completed(entry, last.revision)
        )

    def _is_done(self, key: Key) -> bool:
        """Return whether a service is Ready with a template that this operator builds, or is gone."""
        entry = self._cache.get(key)
        if entry is None or not entry.present:
            return True
        target = None if entry.desired is None else entry.desired.target
        return target is not None and not target.outdated and _completed(entry, target.revision)


def _completed(entry: Entry, revision: str) -> bool:
    """Return whether a service is Ready with this revision, and it has passed the comparison with the one before it."""
    status = entry.status
    if status is None or status.analyzing:
        return False
    return _is_ready(entry) and status.current_revision == revision


def _is_ready(entry: Entry) -> bool:
    condition = entry.status.condition(READY) if entry.status is not None else None
    return condition is not None and condition.status == "True"
