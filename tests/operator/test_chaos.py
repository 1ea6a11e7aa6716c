"""Random edits while the API server is slow, refuses, loses responses, cuts watches and restarts: nothing is lost.

Seconds, edits and faults of a run come from `SKIFF_TEST_CHAOS_SECONDS` and `SKIFF_TEST_SEED`; each run prints its counts.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from api_chaos import ChaosProxy
from apiserver import ApiServer
from controlplane import ControlPlane
from operator_checks import resynced, settle
from operator_process import OperatorProcess, eventually
from random_edits import RandomEdits, wrong_children, wrong_statuses

from skiff_operator.settings import from_arguments

SEED: Final = int(os.environ.get("SKIFF_TEST_SEED", "0"))
FULL_SECONDS: Final = float(os.environ.get("SKIFF_TEST_CHAOS_SECONDS", "1800"))
EDIT_SECONDS: Final = 0.1
RESTART_EVERY_SECONDS: Final = 60.0
CONVERGE_SECONDS: Final = 120.0
FLAGS: Final = (
    *("--identity", "chaos", "--status-delay-seconds", "0.1", "--resync-seconds", "2"),
    # The Role of the operator allows one Lease only, which every test takes over under its own identity.
    *("--lease-duration-seconds", "600", "--lease-renew-seconds", "200", "--watch-timeout-seconds", "20"),
)
LEFTOVER: Final = "deleted a child of an earlier InferenceService"
"""The operator's words about what the garbage collector has overlooked."""
WRITES_PER_EDIT: Final = 6.0
"""Bound on the average: an edit changes at most five children, some by two writes (the first change of a child converts
its managed fields), then the status and an Event; most edits change one child. 2.5 were measured."""


@pytest.fixture
def proxy(plane: ControlPlane, server: ApiServer) -> Iterator[ChaosProxy]:
    """A proxy in front of the API server that is calm until it is made active."""
    proxy = ChaosProxy(plane.kubeconfig, seed=SEED)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.mark.parametrize(
    "seconds",
    [6.0, pytest.param(FULL_SECONDS, marks=[pytest.mark.soak, pytest.mark.timeout(FULL_SECONDS + 600)])],
)
def test_nothing_is_lost_and_nothing_loops(
    api: ApiServer,
    plane: ControlPlane,
    proxy: ChaosProxy,
    operator_kubeconfig: Path,
    tmp_path: Path,
    seconds: float,
) -> None:
    flags = ("--namespaces", api.namespace, *FLAGS)
    kubeconfig = proxy.through(operator_kubeconfig, tmp_path / "kubeconfig")
    operator = OperatorProcess(kubeconfig, tmp_path / "log", *flags)
    edits = RandomEdits(api, SEED)
    choice = random.Random(SEED)
    restarts = 0
    try:
        operator.start()
        proxy.active = True
        began = time.monotonic()
        restart_at = began + RESTART_EVERY_SECONDS
        while time.monotonic() < began + seconds:
            edits.edit()
            time.sleep(choice.expovariate(1 / EDIT_SECONDS))
            if time.monotonic() > restart_at:
                restarts, restart_at = restarts + 1, time.monotonic() + RESTART_EVERY_SECONDS
                plane.restart("kube-apiserver")
        proxy.active = False
        writes, disturbed = proxy.writes, dict(proxy.disturbed)
        settings = from_arguments(flags, {})
        _converge(edits, lambda: wrong_children(api, settings))
        # A ReplicaSet whose Deployment was deleted and made again in a gap of the garbage collector's watch stays, and
        # so do its pods. The operator has no right to delete it; a garbage collector that starts finds it.
        plane.restart("kube-controller-manager")
        _converge(edits, lambda: wrong_statuses(api))
        edits.assert_foreign_untouched()
        settle(operator)
        before = proxy.writes
        resynced(operator)
        resident = round(operator.process.memory_info().rss / 2**20)
        counts = {
            "edits": edits.made,
            "restarts": restarts,
            "writes": writes,
            "disturbed": disturbed,
            "leftovers": operator.log.read_text().count(LEFTOVER),
            "resident_mib": resident,
        }
        print(f"chaos: {seconds:.0f} s, seed {SEED}: {json.dumps(counts)}")
        assert proxy.writes == before, "an operator with nothing to do writes nothing"
        assert writes < WRITES_PER_EDIT * edits.made.total(), counts
        assert '"traceback"' not in operator.log.read_text()
    finally:
        operator.end()


def _converge(edits: RandomEdits, look: Callable[[], list[str]]) -> None:
    """Wait until `look` finds nothing wrong, and print what it finds."""

    def converged() -> bool:
        edits.serve_all()
        found = look()
        if found:
            print("\n".join(found))
        return not found

    eventually(converged, "all is as desired", CONVERGE_SECONDS, every_seconds=0.5)
