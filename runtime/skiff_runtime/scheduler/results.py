"""What a step brought: tokens are appended, counted, and checked for the end of their request, and all is told."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.kvcache.base import Int32
from skiff_runtime.messages import NO_TOKEN, Finish, RequestFailed, TokenLogprobs
from skiff_runtime.scheduler import logprobs
from skiff_runtime.scheduler.replies import Replies
from skiff_runtime.scheduler.slots import Rows, Slots
from skiff_runtime.step import PromptChunk, StepResult

STUCK: Final = (
    "the answer cannot go on: no token of this model's vocabulary may follow under the grammar; "
    "change the grammar, schema or pattern of the request"
)


class Results:
    """Applies retired tokens to the slots and reports them."""

    def __init__(self, *, eos_token_ids: tuple[int, ...], slots: Slots, replies: Replies) -> None:
        self._eos: Int32 = np.array(eos_token_ids, np.int32)
        self._slots = slots
        self._replies = replies

    def apply(self, rows: Rows, result: StepResult) -> Rows:
        """One token for each of the slots int32[S] that sampled; the slots whose requests ended.

        Slots whose request has ended meanwhile (at end of sequence, or aborted, while
        this step was in flight) are passed over: their token is dropped. Those whose grammar
        left them no token fail.
        """
        slots, tokens = self._slots, result.tokens
        alive = slots.alive[rows]
        self._tell_prompts(result.prompts)
        told = logprobs.of_rows(result, slots, rows, alive)
        if not alive.all():
            rows, tokens = rows[alive], tokens[alive]
        stuck = tokens == NO_TOKEN
        if stuck.any():
            self._fail(rows[stuck])
            return np.concatenate([rows[stuck], self._append(rows[~stuck], tokens[~stuck], told)])
        return self._append(rows, tokens, told)

    def _append(self, rows: Rows, tokens: Int32, told: list[TokenLogprobs]) -> Rows:
        """Tokens of running requests; the slots of those that end with them."""
        slots = self._slots
        known = slots.known[rows]
        slots.tokens[rows, known] = tokens
        slots.known[rows] = known + 1
        unsent = slots.unsent[rows] - 1
        slots.unsent[rows] = unsent
        finishes = np.where(unsent == 0, np.uint8(Finish.LENGTH), np.uint8(Finish.RUNNING))
        finishes[self._stopped(rows, tokens)] = Finish.STOP
        if len(rows):
            self._replies.rows(slots.uids[rows], tokens, finishes, told)
        ended: Rows = rows[finishes != Finish.RUNNING]
        return ended

    def _fail(self, rows: Rows) -> None:
        """End what cannot go on. A step in flight may compute one more token of it, which is nobody's."""
        slots = self._slots
        slots.computed[rows] = np.minimum(slots.computed[rows], slots.known[rows])
        for uid in slots.uids[rows].tolist():
            self._replies.fail(RequestFailed.of(uid, InvalidRequest(STUCK, code="grammar_stuck")))

    def _tell_prompts(self, chunks: tuple[PromptChunk, ...]) -> None:
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
