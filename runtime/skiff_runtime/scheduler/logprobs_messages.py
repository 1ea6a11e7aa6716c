"""What the engine tells of log-probabilities, cut to what each request asked for."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import NO_TOKEN, PromptLogprobs, TokenLogprobs, Wire
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Rows, Slots
from skiff_runtime.step import Logprobs, PromptLogprobsOutput, StepResult

_FIRST: Final = 1
"""Tokens of a prompt that nothing predicts."""


def build_token_logprobs(
    result: StepResult, slots: Slots, rows: Rows, alive: NDArray[np.bool_]
) -> list[TokenLogprobs]:
    """What is told of sampled rows that are ``alive`` and got a token, numbered as if the others were not there."""
    if result.logprobs is None:
        return []
    alive = alive & (result.tokens >= 0)
    numbers = np.cumsum(alive) - 1
    told = []
    for index, row in enumerate(result.logprob_rows.tolist()):
        count = slots.request(int(rows[row])).sampling.logprobs
        if alive[row] and count is not None:
            told.append(_of_row(int(numbers[row]), result.logprobs, index, count))
    return told


def _of_row(row: int, logprobs: Logprobs, index: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        row=row,
        logprob=float(logprobs.chosen[index]),
        top_ids=logprobs.top_ids[index, :count].astype(Wire.TOKEN).tobytes(),
        top_logprobs=logprobs.top[index, :count].astype(Wire.LOGPROB).tobytes(),
    )


def build_first_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """That of the prompt's first token, which nothing predicts; None where no prompt is to be told."""
    count = request.sampling.prompt_logprobs
    if count is None:
        return None
    request.num_prompt_logprobs_sent = _FIRST
    return PromptLogprobs(
        uid=request.uid,
        start=0,
        top=count,
        token_ids=request.tokens[:_FIRST].astype(Wire.TOKEN).tobytes(),
        logprobs=np.full(_FIRST, np.nan, Wire.LOGPROB).tobytes(),
        top_ids=np.full(count, NO_TOKEN, Wire.TOKEN).tobytes(),
        top_logprobs=np.full(count, np.nan, Wire.LOGPROB).tobytes(),
    )


def of_prompt(request: Request, chunk: PromptLogprobsOutput) -> PromptLogprobs | None:
    """What a chunk adds to what was told of a prompt; a preempted request computes some of it once more."""
    count = request.sampling.prompt_logprobs
    told, end = request.num_prompt_logprobs_sent, chunk.start + len(chunk.logprobs.chosen)
    if count is None or end <= told:
        return None
    assert chunk.start <= told, "tokens of a prompt were passed over"
    request.num_prompt_logprobs_sent = end
    fresh = slice(told - chunk.start, None)
    return PromptLogprobs(
        uid=request.uid,
        start=told,
        top=count,
        token_ids=request.tokens[told:end].astype(Wire.TOKEN).tobytes(),
        logprobs=chunk.logprobs.chosen[fresh].astype(Wire.LOGPROB).tobytes(),
        top_ids=chunk.logprobs.top_ids[fresh, :count].astype(Wire.TOKEN).tobytes(),
        top_logprobs=chunk.logprobs.top[fresh, :count].astype(Wire.LOGPROB).tobytes(),
    )
