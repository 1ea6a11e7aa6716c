"""What a step brought: tokens are appended, counted, and checked for the end of their request, and all is told."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime import log
from skiff_runtime.errors import InternalError, InvalidRequest, RequestError
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.messages import NO_TOKEN, FinishReason, RequestFailed, TokenLogprobs
from skiff_runtime.scheduler import logprobs_messages as logprobs
from skiff_runtime.scheduler.slots import Rows, Slots
from skiff_runtime.scheduler.token_batch_builder import Replies
from skiff_runtime.step import NAN_LOGITS, PromptLogprobsOutput, StepResult

STUCK: Final = (
    "the answer cannot go on: no token of this model's vocabulary may follow under the grammar; "
    "change the grammar, schema or pattern of the request"
)
CORRUPTED: Final = (
    "the model computed NaN for this request, so no token could be sampled; the request may be retried. Where it fails "
    "again, its weights or its dtype are to blame: float16 overflows where bfloat16 and float32 do not (--dtype)"
)


class ResultProcessor:
    """Applies retired tokens to the slots and reports them."""

    def __init__(self, *, eos_token_ids: tuple[int, ...], slots: Slots, replies: Replies) -> None:
        self._eos: Int32 = np.array(eos_token_ids, np.int32)
        self._slots = slots
        self._replies = replies
        self.corrupted = 0
        """Requests that failed since the start because their logits contained NaN."""

    def apply(self, rows: Rows, result: StepResult) -> Rows:
        """One token for each of the slots int32[S] that sampled; the slots whose requests ended.

        Slots whose request has ended meanwhile (at end of sequence, or aborted, while
        this step was in flight) are passed over: their token is dropped. Those whose grammar
        left them no token fail, and so do those whose logits contain NaN.
        """
        slots, tokens = self._slots, result.tokens
        alive = slots.alive[rows]
        self._tell_prompts(result.prompts)
        told = logprobs.build_token_logprobs(result, slots, rows, alive)
        if not alive.all():
            rows, tokens = rows[alive], tokens[alive]
        failed = tokens < 0
        if not failed.any():
            return self._append(rows, tokens, told)
        self._fail(rows[tokens == NO_TOKEN], InvalidRequest(STUCK, code="grammar_stuck"))
        self._fail_corrupted(rows[tokens == NAN_LOGITS])
        return np.concatenate([rows[failed], self._append(rows[~failed], tokens[~failed], told)])

    def _append(self, rows: Rows, tokens: Int32, told: list[TokenLogprobs]) -> Rows:
        """Tokens of running requests; the slots of those that end with them."""
        slots = self._slots
        known = slots.known[rows]
        slots.tokens[rows, known] = tokens
        slots.known[rows] = known + 1
        unsent = slots.unsent[rows] - 1
        slots.unsent[rows] = unsent
        finishes = np.where(unsent == 0, np.uint8(FinishReason.LENGTH), np.uint8(FinishReason.RUNNING))
        finishes[self._stopped(rows, tokens)] = FinishReason.STOP
        if len(rows):
            self._replies.rows(slots.uids[rows], tokens, finishes, told)
        ended: Rows = rows[finishes != FinishReason.RUNNING]
        return ended

    def _fail(self, rows: Rows, error: RequestError) -> None:
        """End requests that cannot go on. The step in flight may compute one more token of them, which is dropped."""
        slots = self._slots
        slots.computed[rows] = np.minimum(slots.computed[rows], slots.known[rows])
        for uid in slots.uids[rows].tolist():
            self._replies.fail(RequestFailed.of(uid, error))

    def _fail_corrupted(self, rows: Rows) -> None:
        """End requests whose logits contain NaN, and keep what they computed out of the prefix cache."""
        self._fail(rows, InternalError(CORRUPTED, code="nan_logits"))
        for row in rows.tolist():
            request = self._slots.request(row)
            request.corrupted = True
            self.corrupted += 1
            log.error("nan_logits", uid=request.uid, computed_tokens=int(self._slots.computed[row]))

    def _tell_prompts(self, chunks: tuple[PromptLogprobsOutput, ...]) -> None:
        for chunk in chunks:
            if self._slots.alive[chunk.slot]:
                told = logprobs.of_prompt(self._slots.request(chunk.slot), chunk)
                if told is not None:
                    self._replies.prompt(told)

    def _stopped(self, rows: Rows, tokens: Int32) -> NDArray[np.bool_]:
        """Which tokens end their sequence by what they are."""
        stopped: NDArray[np.bool_] = (tokens[:, None] == self._eos).any(axis=1)
        stopped &= ~self._slots.ignores_eos[rows]
        for index in np.flatnonzero(self._slots.has_stops[rows]):
            sampling = self._slots.request(int(rows[index])).sampling
            stopped[index] |= int(tokens[index]) in sampling.stop_token_ids
        return stopped
