"""The result processor: appends a step's tokens to their requests, detects the end of requests, and reports both."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime import log
from skiff_runtime.errors import InternalError, InvalidRequest, RequestError
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.messages import NO_TOKEN, FinishReason, RequestFailed, TokenLogprobs
from skiff_runtime.scheduler.logprobs_messages import build_prompt_logprobs, build_token_logprobs
from skiff_runtime.scheduler.slots import SlotIndices, Slots
from skiff_runtime.scheduler.token_batch_builder import TokenBatchBuilder
from skiff_runtime.step import NAN_LOGITS, PooledOutput, PromptLogprobsOutput, StepResult

GRAMMAR_STUCK_MESSAGE: Final = (
    "the answer cannot continue: no token of this model's vocabulary may follow under the grammar; "
    "change the grammar, schema or pattern of the request"
)
NAN_LOGITS_MESSAGE: Final = (
    "the model computed NaN for this request, so no token could be sampled; the request may be retried. If it fails "
    "again, the cause is the model's weights or its dtype: float16 overflows where bfloat16 and float32 do not (--dtype)"
)


class ResultProcessor:
    """Applies the results of retired steps to the slots, and adds them to the next token batch."""

    def __init__(self, *, eos_token_ids: tuple[int, ...], slots: Slots, replies: TokenBatchBuilder) -> None:
        self._eos: Int32 = np.array(eos_token_ids, np.int32)
        self._slots = slots
        self._replies = replies
        self.corrupted = 0
        """Requests that failed since the start because their logits contained NaN."""

    def process(self, sampled: SlotIndices, result: StepResult) -> SlotIndices:
        """Apply the result of a step in which the slots int32[S] sampled; return the slots whose requests ended."""
        ended = self._process_tokens(sampled, result)
        return np.concatenate([ended, *map(self._finish_pooled, result.pooled)]) if result.pooled else ended

    def _process_tokens(self, sampled: SlotIndices, result: StepResult) -> SlotIndices:
        """Apply one token to each of the slots int32[S] that sampled; return the slots whose requests ended.

        The token of a request that ended while this step was in flight (at end of sequence, or aborted) is
        dropped. Requests whose grammar admits no token fail, and so do those whose logits contain NaN.
        """
        slots, tokens = self._slots, result.tokens
        alive = slots.alive[sampled]
        self._report_prompts(result.prompt_logprobs)
        logprobs = build_token_logprobs(result, slots, sampled, alive)
        if not alive.all():
            sampled, tokens = sampled[alive], tokens[alive]
        failed = tokens < 0
        if not failed.any():
            return self._append(sampled, tokens, logprobs)
        self._fail(sampled[tokens == NO_TOKEN], InvalidRequest(GRAMMAR_STUCK_MESSAGE, code="grammar_stuck"))
        self._fail_corrupted(sampled[tokens == NAN_LOGITS])
        ended = self._append(sampled[~failed], tokens[~failed], logprobs)
        return np.concatenate([sampled[failed], ended])

    def _append(self, slots: SlotIndices, tokens: Int32, logprobs: list[TokenLogprobs]) -> SlotIndices:
        """Append a token to each of these running requests; return the slots of those that end with it."""
        left = self._slots.append_outputs(slots, tokens)
        reasons = np.where(left == 0, np.uint8(FinishReason.LENGTH), np.uint8(FinishReason.RUNNING))
        reasons[self._is_stop(slots, tokens)] = FinishReason.STOP
        if len(slots):
            self._replies.add_tokens(self._slots.uids[slots], tokens, reasons, logprobs)
        ended: SlotIndices = slots[reasons != FinishReason.RUNNING]
        return ended

    def _fail(self, slots: SlotIndices, error: RequestError) -> None:
        """Fail requests that cannot continue. A step in flight may compute one more token of each, which is dropped."""
        self._slots.drop_unknown_tokens(slots)
        for uid in self._slots.uids[slots].tolist():
            self._replies.add_failure(RequestFailed.of(uid, error))

    def _fail_corrupted(self, slots: SlotIndices) -> None:
        """Fail requests whose logits contain NaN, and keep what they computed out of the prefix cache."""
        self._fail(slots, InternalError(NAN_LOGITS_MESSAGE, code="nan_logits"))
        for slot in slots.tolist():
            request = self._slots.request(slot)
            request.has_nan = True
            self.corrupted += 1
            computed_tokens = int(self._slots.num_computed_tokens[slot])
            log.error("nan_logits_found", uid=request.uid, computed_tokens=computed_tokens)

    def _finish_pooled(self, pooled: PooledOutput) -> SlotIndices:
        """Report vectors of requests, which end with them; return their slots. Those that were aborted meanwhile are dropped.

        A request whose vector contains NaN fails.
        """
        alive = self._slots.alive[pooled.slots]
        slots, vectors = pooled.slots[alive], pooled.vectors[alive]
        corrupted = np.isnan(vectors).any(axis=1)
        self._fail_corrupted(slots[corrupted])
        for slot, vector in zip(slots[~corrupted].tolist(), vectors[~corrupted], strict=True):
            self._replies.add_vector(int(self._slots.uids[slot]), vector)
        return slots

    def _report_prompts(self, chunks: tuple[PromptLogprobsOutput, ...]) -> None:
        for chunk in chunks:
            if self._slots.alive[chunk.slot]:
                logprobs = build_prompt_logprobs(self._slots.request(chunk.slot), chunk)
                if logprobs is not None:
                    self._replies.add_prompt_logprobs(logprobs)

    def _is_stop(self, slots: SlotIndices, tokens: Int32) -> NDArray[np.bool_]:
        """Return which tokens end their sequence: an end of sequence, or one of the request's stop tokens."""
        stops: NDArray[np.bool_] = (tokens[:, None] == self._eos).any(axis=1)
        stops &= ~self._slots.ignores_eos[slots]
        for index in np.flatnonzero(self._slots.has_stop_tokens[slots]):
            sampling = self._slots.request(int(slots[index])).sampling
            stops[index] |= int(tokens[index]) in sampling.stop_token_ids
        return stops
