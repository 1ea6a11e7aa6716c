"""Small steps of small models are computed by one thread, all others by all threads."""

import pytest
import torch

from skiff_runtime.engine.cpu import SMALL_MODEL_PARAMETERS, SMALL_STEP_MULTIPLICATIONS, StepThreads


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The arguments of all calls of ``torch.set_num_threads``."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_torch_is_called_only_for_changes(calls: list[int]) -> None:
    threads, parameters = StepThreads(4, 1_000_000), 1_000_000
    for tokens in (
        1,
        2,
        SMALL_STEP_MULTIPLICATIONS // parameters,
        SMALL_STEP_MULTIPLICATIONS // parameters + 1,
        1 << 20,
        1,
    ):
        threads.set_for(tokens)
    assert calls == [1, 4, 1]


@pytest.mark.parametrize(("max_threads", "parameters"), [(1, 1000), (4, SMALL_MODEL_PARAMETERS + 1)])
def test_large_model_or_single_thread_never_changes(
    calls: list[int], max_threads: int, parameters: int
) -> None:
    threads = StepThreads(max_threads, parameters)
    for tokens in (1, 1 << 20):
        threads.set_for(tokens)
    assert calls == []
