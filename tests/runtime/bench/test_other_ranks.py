"""The other ranks of the benchmark of prefill interference: none of them may fail or hang unnoticed at its end."""

import subprocess
import sys
from typing import Any

import pytest

from skiff_runtime.bench.offline import prefill_interference
from skiff_runtime.bench.offline.prefill_interference import _OtherRanks
from skiff_runtime.errors import SkiffError


def make_ranks(monkeypatch: pytest.MonkeyPatch, *programs: str) -> _OtherRanks:
    """Return ranks 1, 2, ... that run these Python programs."""
    monkeypatch.setattr(prefill_interference, "END_SECONDS", 0.5)
    launch: Any = None
    load: Any = None
    ranks = _OtherRanks(launch, load)
    ranks._processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    return ranks


def test_rank_that_fails_at_the_end_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(monkeypatch, "", "import sys; sys.exit(3)")
    monkeypatch.setattr(prefill_interference, "END_SECONDS", 60.0)
    with pytest.raises(SkiffError, match="rank 2 ended with code 3"):
        ranks.__exit__(None, None, None)


def test_rank_that_hangs_at_the_end_is_killed_and_the_others_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = make_ranks(monkeypatch, "import time; time.sleep(600)", "import time; time.sleep(600)")
    with pytest.raises(SkiffError, match="rank 1 ended with code -9"):
        ranks.__exit__(None, None, None)
    assert [process.poll() for process in ranks._processes] == [-9, -9]


def test_error_of_the_first_rank_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(monkeypatch, "import time; time.sleep(600)")
    error = ValueError()
    ranks.__exit__(ValueError, error, None)
    assert ranks._processes[0].poll() == -9
