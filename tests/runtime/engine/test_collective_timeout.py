"""A step whose collective has timed out raises, when its result is read and while it is waited for."""

from concurrent.futures import Future

import pytest
import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import _LaunchedStep
from skiff_runtime.engine.step_output import StepOutput
from skiff_runtime.errors import CollectiveTimeout


class LonelyGroup(TensorParallelGroup):
    """A group whose collective has given up."""

    def check(self) -> None:
        raise CollectiveTimeout("one-shot all-reduce")


def finished() -> "Future[StepOutput]":
    future: Future[StepOutput] = Future()
    future.set_result(StepOutput(torch.tensor([7])))
    return future


def test_result_of_a_failed_collective_is_not_returned() -> None:
    assert _LaunchedStep(finished(), TensorParallelGroup()).result().tokens.tolist() == [7]
    step = _LaunchedStep(finished(), LonelyGroup())
    for read in (step.result, lambda: step.wait(1.0)):
        with pytest.raises(CollectiveTimeout):
            read()


def test_step_that_never_ends_behind_a_failed_collective_raises_while_it_is_waited_for() -> None:
    unfinished: Future[StepOutput] = Future()
    assert not _LaunchedStep(unfinished, TensorParallelGroup()).wait(0.01)
    with pytest.raises(CollectiveTimeout):
        _LaunchedStep(unfinished, LonelyGroup()).wait(0.01)
