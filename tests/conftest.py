"""Test configuration: without a GPU, Triton runs kernels in its interpreter, which must be set before any import of Triton."""

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
    """Fill allocations of kernel tests with poison, which shows where nothing was written."""
    from kernel_device import poison_allocations  # which imports Triton

    poison_allocations(monkeypatch)
