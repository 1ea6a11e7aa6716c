"""Small steps of small models are computed by one thread, all others by as many as there may be."""

import pytest
import torch

from skiff_runtime.engine.cpu import SMALL_MODEL, SMALL_STEP, StepThreads


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that torch is told."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_only_changes_are_told(told: list[int]) -> None:
    threads, parameters = StepThreads(4, 1_000_000), 1_000_000
    for tokens in (1, 2, SMALL_STEP // parameters, SMALL_STEP // parameters + 1, 1 << 20, 1):
        threads.choose(tokens)
    assert told == [1, 4, 1]


@pytest.mark.parametrize(("most", "parameters"), [(1, 1000), (4, SMALL_MODEL + 1)])
def test_large_models_and_single_threads_stay_as_they_are(
    told: list[int], most: int, parameters: int
) -> None:
    threads = StepThreads(most, parameters)
    for tokens in (1, 1 << 20):
        threads.choose(tokens)
    assert told == []
