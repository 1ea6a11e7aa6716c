"""The whole scheduler over an engine that costs next to nothing: its own time for a decode step."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from skiff_runtime.bench.online.results import Figures
from skiff_runtime.config import Config
from skiff_runtime.messages import GenerateRequest, SamplingSpec, TextOptions, TokenBatch, Wire, encode
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.step import StepPlan, StepResult

BATCHES: Final = (1, 64, 256)
PROMPT_TOKENS: Final = 64
CONTEXT: Final = 4096
WARM_UP_STEPS: Final = 20


class _Done:
    """A step that takes no time."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self, timeout_seconds: float) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class NullEngine:
    """Samples token 1 in every row."""

    def launch(self, plan: StepPlan) -> _Done:
        return _Done(StepResult(np.ones(int(plan.samples.sum()), dtype=np.int32)))


class _Wire(Channel):
    """Hands over what it was given at once; encodes what is sent, as a real one does."""

    def __init__(self, items: Sequence[SchedulerInput]) -> None:
        self._items = list(items)

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        items, self._items = self._items, []
        return items

    def send(self, batch: TokenBatch) -> None:
        encode(batch)


def scheduler_steps(count: int) -> Figures:
    """By batch size: CPU-microseconds of one decode step, the mean over ``count`` steps."""
    return {str(batch): _microseconds(batch, count) for batch in BATCHES}


def _microseconds(batch: int, count: int) -> float:
    config = Config(
        device="cpu",
        max_model_len=CONTEXT,
        max_running_requests=batch,
        max_num_batched_tokens=max(batch * PROMPT_TOKENS, 1),
    )
    steps = count + 4 * WARM_UP_STEPS
    pages = batch * (-(-(PROMPT_TOKENS + steps) // config.page_size) + 1)
    scheduler = Scheduler(
        config,
        eos_token_ids=(),
        num_pages=pages,
        engine=NullEngine(),
        channel=_Wire([_request(uid, steps) for uid in range(1, batch + 1)]),
    )
    for _ in range(WARM_UP_STEPS):
        scheduler.turn()
    began = time.process_time()
    for _ in range(count):
        scheduler.turn()
    return (time.process_time() - began) / count * 1e6


def _request(uid: int, tokens: int) -> GenerateRequest:
    prompt = np.random.default_rng(uid).integers(2, 1000, PROMPT_TOKENS)
    sampling = SamplingSpec(max_tokens=tokens, seed=0, temperature=0.0)
    return GenerateRequest(uid, prompt.astype(Wire.TOKEN).tobytes(), sampling, TextOptions())
