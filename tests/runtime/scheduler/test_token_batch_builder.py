"""The batch builder sends the ids of a prompt where the request wants them back."""

import numpy as np
import pytest

from skiff_runtime.messages import SamplingSpec, StepStats, TextOptions, Wire
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.token_batch_builder import TokenBatchBuilder


@pytest.mark.parametrize("returned", [False, True])
def test_opened_request_has_prompt_token_ids_on_request(returned: bool) -> None:
    request = Request(
        uid=1,
        queue_key=(1, 1),
        tokens=np.array([5, 6, 7], np.int32),
        prompt_tokens=2,
        sampling=SamplingSpec(max_tokens=4, seed=0),
        text=TextOptions(return_token_ids=returned),
    )
    builder = TokenBatchBuilder()
    builder.add_opened(request, 2.5)
    [opened] = builder.take(StepStats()).opened
    assert np.frombuffer(opened.prompt_token_ids, Wire.TOKEN).tolist() == ([5, 6] if returned else [])
