"""Test configuration: without a GPU, Triton runs kernels in its interpreter, which must be set before any import of Triton."""

import os
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
"""The same examples each time, however slow the machine; ``--hypothesis-profile default`` looks for new ones."""


INTEGRATION_FIXTURES: Final = {"plane", "helm", "promtool"}
"""Fixtures that need programs of Kubernetes, a control plane among them."""
OPERATOR_TESTS: Final = "tests/operator/"
WITHOUT_SHARED_PLANE: Final = {
    f"{OPERATOR_TESTS}test_{name}.py"
    for name in ("alerts", "autoscaling", "chart", "chart_metadata", "chart_router", "releases")
}
"""Long files of the operator that need no control plane, or start their own."""


def shares_control_plane(file: str) -> bool:
    """Return whether a file's tests use the control plane of the session."""
    return file.startswith(OPERATOR_TESTS) and file not in WITHOUT_SHARED_PLANE


class OperatorOnOneWorker(LoadFileScheduling):  # type: ignore[misc]
    """Run one file at a time on each worker, and all files that share a control plane on the same worker.

    They mostly wait for the control plane, which each worker would start for itself.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return OPERATOR_TESTS if shares_control_plane(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OperatorOnOneWorker | None:
    """Replace the schedule of ``--dist loadfile``."""
    return OperatorOnOneWorker(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures need programs of Kubernetes as integration tests, and sort all tests.

    The files that share a control plane come first, so that the worker that runs them is not the last to end.
    """
    for item in items:
        if INTEGRATION_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not shares_control_plane(item.nodeid.partition("::")[0]))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill allocations of kernel tests with poison, which shows where nothing was written."""
    from kernel_device import poison_allocations  # which imports Triton

    poison_allocations(monkeypatch)
