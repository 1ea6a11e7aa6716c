"""Skips tests that need more GPUs than the machine has, when suites run on GPUs; on a CPU ranks are plain processes."""

import os
from typing import Final

import pytest

from skiff_runtime.processes.resolve import count_gpus

ON_GPU: Final = os.environ.get("SKIFF_TEST_DEVICE", "cpu") == "cuda"


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Return a mark that skips a test whose ``count`` ranks would need more GPUs than there are."""
    found = count_gpus()
    return pytest.mark.skipif(
        ON_GPU and found < count, reason=f"needs {count} GPUs; this machine shows {found}"
    )
