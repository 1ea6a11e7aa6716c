"""The model of step times that a pod publishes: what a prompt token costs, learned from steps of all lengths."""

import numpy as np
import pytest

from skiff_runtime.api.dispatch.step_time import StepTimeModel
from skiff_runtime.bench.routing.step_times import StepTimes
from skiff_runtime.messages import StepStats

TIMES = StepTimes()
ROWS = 20


def learn(lengths: np.ndarray) -> list[float]:
    """Record steps over prompts of these lengths beside decoding rows. Return the seconds of a token after each."""
    model, learned = StepTimeModel(), []
    for length in lengths.tolist():
        model.record(StepStats(step_seconds=TIMES.mixed(ROWS, 0, 0, 0), decode_tokens=ROWS))
        seconds = TIMES.mixed(ROWS, 0, length, 0)
        model.record(StepStats(step_seconds=seconds, prefill_tokens=length, decode_tokens=ROWS))
        learned.append(model.prefill_token_seconds)
    return learned


def test_first_prompt_tells_what_a_token_costs() -> None:
    [seconds] = learn(np.array([2000]))
    assert seconds == pytest.approx(TIMES.prompt_token - TIMES.base / 2000)


@pytest.mark.parametrize("seed", range(4))
def test_short_prompts_do_not_make_tokens_look_cheap(seed: int) -> None:
    """Up to 152 tokens take no time beside the weights. The mean over all tokens of these steps would be half as much, and that of the last 20 vary by a quarter."""
    random = np.random.default_rng(seed)
    lengths = np.where(random.random(2000) < 0.95, random.integers(20, 300, 2000), 2000)
    learned = np.array(learn(lengths)[200:])
    assert TIMES.prompt_token * 0.7 < learned.min() <= learned.max() < TIMES.prompt_token
    assert learned.std() < 0.05 * learned.mean(), "routers compare pods by it"
