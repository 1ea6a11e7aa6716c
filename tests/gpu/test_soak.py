"""Thousands of requests in one process on a GPU: every page is freed, and memory stays flat."""

import os
from typing import Final

import pytest
from engine_soak import Crowd, soak

from skiff_runtime import shapes

pytestmark = pytest.mark.gpu

COUNT: Final = int(os.environ.get("SKIFF_TEST_GPU_REQUESTS", "20000"))
RESIDENT_MIB: Final = 8.0
"""Bound of the process's growth: a leak of a kilobyte per request would be 18."""
ALLOCATED_MIB: Final = 4.0
"""A leak of one block of 512 bytes, the smallest there is, per request would be 8.8."""
RESERVED_MIB: Final = 1024.0
"""Torch caches blocks for the largest steps; these are rare, so the first tenth may have had smaller ones."""


@pytest.mark.timeout(600)
def test_many_requests_leak_no_pages_and_no_memory() -> None:
    outcome = soak(
        shapes.find("shape://qwen3-0.6b"),
        COUNT,
        longest=512,
        outputs=24,
        seed=11,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=1024,
        max_running_requests=256,
        max_num_batched_tokens=8192,
        max_total_tokens=49_152,
    )
    ledger, early, late = outcome.ledger, outcome.early, outcome.late
    print(f"\n{ledger.ended} tokens={ledger.tokens} evicted={ledger.evicted} preempted={ledger.preempted}")
    print(f"hits={ledger.hits} flushed={ledger.flushed} {early} {late}")
    assert ledger.ended.total() == COUNT and not ledger.running
    assert 0 < ledger.ended["ABORT"] <= COUNT // Crowd.ABORTED + 1
    assert ledger.evicted > 0 and ledger.hits > 0
    assert ledger.flushed is not None
    total, free, cached = ledger.flushed
    assert (free, cached) == (total, 0)
    assert late.resident - early.resident < RESIDENT_MIB
    assert abs(late.allocated - early.allocated) < ALLOCATED_MIB
    assert late.reserved - early.reserved < RESERVED_MIB
