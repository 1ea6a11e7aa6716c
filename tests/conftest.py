"""Where there is no GPU, Triton's kernels run in its interpreter, which must be said before anything imports Triton."""

import os
from pathlib import Path

import pytest

if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test of kernels allocates shows where it was not written."""
    from kernel_device import poison_allocations  # which imports Triton

    poison_allocations(monkeypatch)
