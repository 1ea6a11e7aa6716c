"""The probe fails when work stands still, and one object's bug is only its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from services import raw, service

from skiff_operator import plan, revisions
from skiff_operator.apply import Failure, Goal
from skiff_operator.cache import Cache, Entry
from skiff_operator.controller import Controller
from skiff_operator.errors import ApiConflict, ApiUnavailable
from skiff_operator.kinds import CONTROLLER_REVISION, INFERENCE_SERVICE, Stage
from skiff_operator.lora.index import Index
from skiff_operator.observe import Observer
from skiff_operator.plan import Step
from skiff_operator.reconcile import Outcome, Reconciler
from skiff_operator.resources.metadata import ANNOTATION_SPEC_HASH, LABEL_REVISION
from skiff_operator.rollout_analyzer import RolloutAnalyzer
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_operator.watch_streams import StreamKey, WatchStreams, watched
from skiff_operator.workqueue import Key
from skiff_runtime import contract

SETTINGS = Settings(workers=2, resync_seconds=0.05, status_delay_seconds=0.01)
KINDS = watched(SETTINGS.autoscaling_engines)


class Scripted:
    """A reconciler that does what the test says, by the key's name."""

    def __init__(self, **errors: Exception) -> None:
        self.turns: list[str] = []
        self._errors = errors

    async def reconcile(self, key: Key) -> Outcome:
        """Fail for some keys and be done with all others."""
        self.turns.append(key[1])
        if key[1] in self._errors:
            raise self._errors[key[1]]
        return Outcome()


def controller(reconciler: Any) -> Controller:
    """A controller around it, before anything is listed."""
    return Controller(Observer(Cache(), SETTINGS), reconciler, WatchStreams(SETTINGS), SETTINGS, Index())


def sync(of: Controller) -> None:
    """End the first list of every kind, all of them empty."""
    of.streams.begin()
    for kind in KINDS:
        of.on_listed(StreamKey(kind, None), set(), 1)


def add(to: Controller, *names: str) -> None:
    """Events of new InferenceServices."""
    for name in names:
        to.on_event(INFERENCE_SERVICE, "ADDED", raw(name))


async def run_until(of: Controller, done: Callable[[], bool]) -> None:
    """Work and resync until then; none of the tasks may end before."""
    tasks = [asyncio.create_task(of.work()) for _ in range(SETTINGS.workers)]
    tasks.append(asyncio.create_task(of.resync()))
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)
            assert not [task for task in tasks if task.done()], "a task ended"
    for task in tasks:
        task.cancel()


def test_a_bug_or_an_outage_for_one_object_harms_no_other() -> None:
    """All have a turn, and those that are well another one, by the resync."""
    names = ("buggy", "unlucky", "fine", "good")
    reconciler = Scripted(buggy=ZeroDivisionError("bug"), unlucky=ApiUnavailable("down"))

    def served() -> bool:
        turns = Counter(reconciler.turns)
        return set(names) <= set(turns) and min(turns["fine"], turns["good"]) > 1

    async def run() -> None:
        of = controller(reconciler)
        sync(of)
        add(of, *names)
        await run_until(of, served)

    asyncio.run(run())


class Interrupted:
    """An applier during whose requests the InferenceService is deleted."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def run(self, _key: Key, _entry: Entry, steps: list[Step], _goal: Goal) -> list[Failure]:
        """Observe the deletion, and fail."""
        self._observer.observe(INFERENCE_SERVICE, raw(), "DELETED")
        return [Failure(step, ApiConflict("deleted")) for step in steps]

    async def read(self, *_: object) -> dict[str, Any]:
        """Observe the deletion, and return a recorded template."""
        self._observer.observe(INFERENCE_SERVICE, raw(), "DELETED")
        return {
            "data": {"template": plan.built_deployment(plan.objects(service(), SETTINGS))["spec"]["template"]}
        }


class NoChoice:
    """A chooser of rollout strategies with nothing to choose."""

    def is_due(self, *_: object) -> bool:
        """Return False."""
        return False


@pytest.mark.parametrize("recorded", [False, True], ids=["during the writes", "while a template is read"])
def test_a_deletion_during_a_reconcile_is_no_bug(recorded: bool) -> None:
    observer = Observer(Cache(), SETTINGS)
    observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    if recorded:
        annotations = {ANNOTATION_SPEC_HASH: revisions.spec_hash(service())}
        meta: dict[str, Any] = {
            "name": "llama-1",
            "uid": "r",
            "resourceVersion": "2",
            "annotations": annotations,
        }
        meta |= {"namespace": "default", "labels": {contract.LABEL_SERVICE: "llama", LABEL_REVISION: "other"}}
        meta["ownerReferences"] = [
            {"kind": "InferenceService", "name": "llama", "uid": "u1", "controller": True}
        ]
        observer.observe(CONTROLLER_REVISION, {"metadata": meta, "revision": 1}, "ADDED")
    analyzer = RolloutAnalyzer(SETTINGS)
    parts: list[Any] = [observer, Interrupted(observer), None, None, NoChoice(), None, analyzer, SETTINGS]
    reconciler = Reconciler(*parts)
    if recorded:
        assert asyncio.run(reconciler.reconcile(("default", "llama"))) == Outcome(stage=Stage.CHILDREN)
    else:
        with pytest.raises(ApiConflict, match="deleted meanwhile"):
            asyncio.run(reconciler.reconcile(("default", "llama")))
    assert asyncio.run(reconciler.reconcile(("default", "llama"))) == Outcome()


def test_the_probe_fails_when_the_resync_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[str, str]:
        of = controller(Scripted())
        sync(of)
        before = of.unhealthy()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + SETTINGS.stale_after_seconds + 1)
        return before, of.unhealthy()

    before, after = asyncio.run(run())
    assert before == "" and "resync" in after


def test_the_probe_fails_when_all_workers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> str:
        of = controller(Scripted())
        sync(of)
        add(of, "waits")
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now + 1000)
        return of.unhealthy()

    assert "waiting for" in asyncio.run(run())


def test_a_replica_that_waits_for_the_lease_is_healthy() -> None:
    async def run() -> str:
        return controller(Scripted()).unhealthy()

    assert asyncio.run(run()) == ""


def test_no_work_begins_before_all_kinds_are_listed() -> None:
    reconciler = Scripted()

    async def run() -> None:
        of = controller(reconciler)
        of.streams.begin()
        of.on_event(INFERENCE_SERVICE, "LISTED", raw("early"))
        for kind in KINDS[:-1]:
            of.on_listed(StreamKey(kind, None), {"u1"}, 1)
        assert f"{KINDS[-1].plural} in all namespaces: not listed yet" == of.streams.unsynced()
        worker = asyncio.create_task(of.work())
        await asyncio.sleep(0.1)
        assert reconciler.turns == []
        worker.cancel()
        of.on_listed(StreamKey(KINDS[-1], None), set(), 1)
        assert of.streams.unsynced() == ""
        await run_until(of, lambda: "early" in reconciler.turns)

    asyncio.run(run())


def test_an_object_that_is_not_understood_ends_no_watch() -> None:
    async def run() -> list[str]:
        of = controller(Scripted())
        sync(of)
        of.on_event(INFERENCE_SERVICE, "ADDED", {"metadata": {"name": "odd"}})
        add(of, "fine")
        return [name for _, name in of._observer.cache]

    assert asyncio.run(run()) == ["fine"]


class EditsMeanwhile:
    """The preparation of a scale-in, during which the spec is edited again."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def prepare(self, _service: InferenceService) -> None:
        """Observe the edit."""
        edited = raw(replicas=4)
        edited["metadata"].update(generation=2, resourceVersion="2")
        self._observer.observe(INFERENCE_SERVICE, edited, "MODIFIED")


class Recorder:
    """An applier that only records the goals that it gets."""

    def __init__(self) -> None:
        self.goals: list[Goal] = []

    async def run(self, _key: Key, _entry: Entry, _steps: list[Step], goal: Goal) -> list[Failure]:
        """Succeed."""
        self.goals.append(goal)
        return []


def test_a_scale_in_that_is_taken_back_while_it_is_prepared_is_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pods that it would take serve requests, and would be loaded again."""
    monkeypatch.setattr(plan, "scales_in", lambda *_: True)
    observer, applier, analyzer = Observer(Cache(), SETTINGS), Recorder(), RolloutAnalyzer(SETTINGS)
    observer.observe(INFERENCE_SERVICE, raw(replicas=2), "ADDED")
    parts: list[Any] = [
        observer,
        applier,
        None,
        None,
        NoChoice(),
        EditsMeanwhile(observer),
        analyzer,
        SETTINGS,
    ]
    outcome = asyncio.run(Reconciler(*parts).reconcile(("default", "llama")))
    assert outcome == Outcome(stage=Stage.CHILDREN) and applier.goals == []
