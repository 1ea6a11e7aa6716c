"""Thousands of requests by one set of ranks: every page is freed, and memory stays flat."""

import os
from pathlib import Path
from typing import Any, Final

import pytest
from engine_soak import Crowd, Outcome
from gpus import ON_GPU, needs_gpus
from rank_functions import soaked
from rank_processes import on_ranks, single_rank

from skiff_runtime import demo, shapes

COUNT: Final = int(os.environ.get("SKIFF_TEST_GPU_REQUESTS", "20000"))
CPU_COUNT: Final = 300
RESIDENT_MIB: Final = 8.0 if ON_GPU else 64.0
"""Bound of a process's growth: a leak of a kilobyte per request would be 18 on a GPU. On a CPU the run is too short."""
ALLOCATED_MIB: Final = 4.0
"""A leak of one block of 512 bytes, the smallest there is, per request would be 8.8."""
RESERVED_MIB: Final = 1024.0
"""Torch caches blocks for the largest steps; these are rare, so the first tenth may have had smaller ones."""
SECONDS: Final = 900.0
GPU_OPTIONS: Final[dict[str, Any]] = {
    "longest": 512,
    "outputs": 24,
    "seed": 11,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_model_len": 1024,
    "max_running_requests": 256,
    "max_num_batched_tokens": 8192,
    "max_total_tokens": 49_152,
}
CPU_OPTIONS: Final[dict[str, Any]] = {
    "longest": 48,
    "outputs": 8,
    "seed": 11,
    "max_model_len": 64,
    "max_running_requests": 64,
    "max_num_batched_tokens": 512,
    "max_total_tokens": 1024,
}

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    "tp",
    [1, pytest.param(2, marks=needs_gpus(2)), pytest.param(4, marks=needs_gpus(4))] if ON_GPU else [2],
    ids=lambda tp: f"tp{tp}",
)
def test_many_requests_leak_no_pages_and_no_memory(tmp_path: Path, tp: int) -> None:
    model = shapes.find("shape://qwen3-0.6b") if ON_GPU else demo.DIRECTORY
    count, options = (COUNT, GPU_OPTIONS) if ON_GPU else (CPU_COUNT, CPU_OPTIONS)
    outcomes = (
        [soaked(single_rank(), model, count, options)]
        if tp == 1
        else on_ranks(tp, tmp_path, soaked, model, count, options, timeout_seconds=SECONDS)
    )
    for outcome in outcomes:
        check(outcome, count)
    assert len({outcome.checksum for outcome in outcomes}) == 1


def check(outcome: Outcome, count: int) -> None:
    """Check that all requests ended and that nothing is held."""
    ledger, early, late = outcome.ledger, outcome.early, outcome.late
    print(f"\n{ledger.ended} tokens={ledger.tokens} evicted={ledger.evicted} preempted={ledger.preempted}")
    print(f"hits={ledger.hits} flushed={ledger.flushed} {early} {late}")
    assert ledger.ended.total() == count and not ledger.running
    assert 0 < ledger.ended["ABORT"] <= count // Crowd.ABORTED + 1
    assert ledger.evicted > 0 and ledger.hits > 0
    assert ledger.flushed is not None
    total, free, cached = ledger.flushed
    assert (free, cached) == (total, 0)
    assert late.resident - early.resident < RESIDENT_MIB
    assert abs(late.allocated - early.allocated) < ALLOCATED_MIB
    assert late.reserved - early.reserved < RESERVED_MIB
