"""Log-probability messages: the engine's results, cut to what each request has requested."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import NO_TOKEN, PromptLogprobs, TokenLogprobs, Wire
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import SlotIndices, Slots
from skiff_runtime.step import LogprobsOutput, PromptLogprobsOutput, StepResult

_UNPREDICTED: Final = 1
"""Tokens at the start of a prompt that no logits predict."""


def build_token_logprobs(
    result: StepResult, slots: Slots, sampled: SlotIndices, alive: NDArray[np.bool_]
) -> list[TokenLogprobs]:
    """Return the log-probabilities that the sampled rows have requested.

    ``sampled``: the slot of each sampled row; ``alive`` bool[len(sampled)]: its request has not ended. Rows
    are numbered among those that are alive and got a token.
    """
    if result.logprobs is None:
        return []
    alive = alive & (result.tokens >= 0)
    numbers = np.cumsum(alive) - 1
    built = []
    for index, row in enumerate(result.logprob_rows.tolist()):
        count = slots.request(int(sampled[row])).sampling.logprobs
        if alive[row] and count is not None:
            built.append(_build_row(int(numbers[row]), result.logprobs, index, count))
    return built


def _build_row(row: int, logprobs: LogprobsOutput, index: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        row=row,
        logprob=float(logprobs.token_logprobs[index]),
        top_ids=logprobs.top_ids[index, :count].astype(Wire.TOKEN).tobytes(),
        top_logprobs=logprobs.top_logprobs[index, :count].astype(Wire.LOGPROB).tobytes(),
    )


def build_first_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Return the entry of a prompt's first token, all NaN; None if log-probabilities are not requested."""
    count = request.sampling.prompt_logprobs
    if count is None:
        return None
    request.num_prompt_logprobs_sent = _UNPREDICTED
    return PromptLogprobs(
        uid=request.uid,
        start=0,
        top=count,
        token_ids=request.tokens[:_UNPREDICTED].astype(Wire.TOKEN).tobytes(),
        logprobs=np.full(_UNPREDICTED, np.nan, Wire.LOGPROB).tobytes(),
        top_ids=np.full(count, NO_TOKEN, Wire.TOKEN).tobytes(),
        top_logprobs=np.full(count, np.nan, Wire.LOGPROB).tobytes(),
        ranks=np.zeros(_UNPREDICTED, Wire.TOKEN).tobytes(),
    )


def build_prompt_logprobs(request: Request, chunk: PromptLogprobsOutput) -> PromptLogprobs | None:
    """Return what a chunk adds to the log-probabilities already sent; None if it adds nothing.

    A preempted request computes some of its prompt once more, and none of it is sent twice.
    """
    count = request.sampling.prompt_logprobs
    sent, end = request.num_prompt_logprobs_sent, chunk.start + len(chunk.logprobs.token_logprobs)
    if count is None or end <= sent:
        return None
    assert chunk.start <= sent, "log-probabilities of a prompt were skipped"
    request.num_prompt_logprobs_sent = end
    fresh = slice(sent - chunk.start, None)
    ranks = chunk.logprobs.token_ranks
    assert ranks is not None, "the positions of a prompt have ranks"
    return PromptLogprobs(
        uid=request.uid,
        start=sent,
        top=count,
        token_ids=request.tokens[sent:end].astype(Wire.TOKEN).tobytes(),
        logprobs=chunk.logprobs.token_logprobs[fresh].astype(Wire.LOGPROB).tobytes(),
        top_ids=chunk.logprobs.top_ids[fresh, :count].astype(Wire.TOKEN).tobytes(),
        top_logprobs=chunk.logprobs.top_logprobs[fresh, :count].astype(Wire.LOGPROB).tobytes(),
        ranks=ranks[fresh].astype(Wire.TOKEN).tobytes(),
    )
