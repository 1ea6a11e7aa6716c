"""CPU time of a decode step in the scheduler, over an engine that takes almost no time."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from skiff_runtime.bench.report import Figures
from skiff_runtime.config import Config
from skiff_runtime.messages import GenerateRequest, SamplingSpec, TextOptions, TokenBatch, Wire, encode
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.step import StepPlan, StepResult

BATCHES: Final = (1, 64, 256)
PROMPT_TOKENS: Final = 64
CONTEXT: Final = 4096
WARM_UP_STEPS: Final = 20


class _FinishedStep:
    """A step that has ended already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self, timeout_seconds: float) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class NullEngine:
    """An engine that samples token 1 in every row."""

    def launch(self, plan: StepPlan) -> _FinishedStep:
        return _FinishedStep(StepResult(np.ones(int(plan.samples.sum()), dtype=np.int32)))


class _StubChannel(Channel):
    """Channel that delivers its items at once, and encodes what is sent, as the real one does."""

    def __init__(self, items: Sequence[SchedulerInput]) -> None:
        self._items = list(items)

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        items, self._items = self._items, []
        return items

    def send(self, batch: TokenBatch) -> None:
        encode(batch)


def measure_scheduler_steps(count: int) -> Figures:
    """Return the CPU microseconds of a decode step by batch size, the mean over ``count`` steps."""
    return {str(batch): _measure_batch(batch, count) for batch in BATCHES}


def _measure_batch(batch: int, count: int) -> float:
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
        channel=_StubChannel([_make_request(uid, steps) for uid in range(1, batch + 1)]),
    )
    for _ in range(WARM_UP_STEPS):
        scheduler.turn()
    started = time.process_time()
    for _ in range(count):
        scheduler.turn()
    return (time.process_time() - started) / count * 1e6


def _make_request(uid: int, tokens: int) -> GenerateRequest:
    prompt = np.random.default_rng(uid).integers(2, 1000, PROMPT_TOKENS)
    sampling = SamplingSpec(max_tokens=tokens, seed=0, temperature=0.0)
    return GenerateRequest(uid, prompt.astype(Wire.TOKEN).tobytes(), sampling, TextOptions())
