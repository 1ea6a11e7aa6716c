"""Where there is no GPU, Triton's kernels run in its interpreter, which must be said before anything imports Triton."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
"""The same examples each time, however slow the machine; ``--hypothesis-profile default`` looks for new ones."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test of kernels allocates shows where it was not written."""
    from kernel_device import poison_allocations  # which imports Triton

    poison_allocations(monkeypatch)
