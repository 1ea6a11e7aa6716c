"""Turns of InferenceServices in an upgrade of the operator: when one ends, and the next begins."""

import pytest
from services import service

from skiff_operator import revisions
from skiff_operator.cache import Cache, Child, DesiredState
from skiff_operator.kinds import CONTROLLER_REVISION
from skiff_operator.revisions import Revision, Target
from skiff_operator.rollout_analysis import Analysis, Figures
from skiff_operator.settings import Settings
from skiff_operator.status import Condition, Status
from skiff_operator.upgrade_waves import UpgradeWaves

FIRST, SECOND = ("default", "a"), ("default", "b")
SETTINGS = Settings(upgrade_policy="Waves")


def upgraded(*, ready: str = "True", phase: str = "", current: str = "new") -> Cache:
    """Two services, of which the first has adopted the new template in a wave."""
    cache = Cache()
    for name in ("a", "b"):
        entry = cache.get_or_create(("default", name))
        entry.service, entry.uid = service(name), "u1"
        state = ready if name == "a" else "True"
        condition = Condition("Ready", state, "", "", "2026-01-01T00:00:00Z", 1)
        analysis = Analysis(phase, Figures("new"), Figures("old")) if phase and name == "a" else None
        entry.status = Status(1, 1, 1, 1, "", "", "new", (condition,), current, analysis=analysis)
    first = cache.get_or_create(FIRST)
    record = Revision(
        name="a-1",
        number=2,
        revision="new",
        base="new",
        spec_hash="h",
        operator_version="",
        cause=revisions.WAVE,
    )
    first.revisions["a-1"] = record
    first.children[(CONTROLLER_REVISION, "a-1")] = Child("r1", "1", 1, "", "", "u1", True)
    target = Target(name="a-1", revision="new", deployed="new", base="new", spec_hash="h", source="built")
    first.desired = DesiredState({}, "new", target=target)
    return cache


@pytest.mark.parametrize(
    ("fields", "over"),
    [
        ({}, True),
        ({"ready": "False"}, False),
        ({"current": "old"}, False),
        ({"phase": "Observing"}, False),
        ({"phase": "Passed"}, True),
    ],
    ids=["ready", "not ready", "ready with the old one", "under observation", "passed"],
)
def test_a_turn_ends_when_the_new_template_has_proven_itself(fields: dict[str, str], over: bool) -> None:
    assert UpgradeWaves(upgraded(**fields), SETTINGS).admit(SECOND) is over, "as a new leader reads it"
    cache = upgraded(ready="False")
    waves = UpgradeWaves(cache, SETTINGS)
    assert not waves.admit(SECOND)
    cache.get_or_create(FIRST).status = upgraded(**fields).get_or_create(FIRST).status
    assert waves.admit(SECOND) is over, "as the leader that gave the turn sees it"


def test_no_turn_is_given_before_the_turns_in_all_namespaces_are_known() -> None:
    cache, listed = upgraded(ready="False"), False
    late = cache.get_or_create(FIRST)
    del cache._entries[FIRST]  # its namespace is not listed yet
    waves = UpgradeWaves(cache, SETTINGS, is_complete=lambda: listed)
    assert not waves.admit(SECOND)
    cache._entries[FIRST], listed = late, True
    assert not waves.admit(SECOND), "the first one has a turn"
