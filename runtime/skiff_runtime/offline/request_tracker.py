"""The requests of an ``LLM`` that are under way: sent to the ranks, and their news brought to whoever asked."""

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np

from skiff_runtime.errors import RequestError
from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, RequestFailed, TextBatch, Wire
from skiff_runtime.offline.engine_client import EngineClient
from skiff_runtime.offline.outputs import CompletionDelta, ended, to_token_logprob
from skiff_runtime.tokenizer.detokenizer import Detokenizer


class _Call:
    """The requests of one call: those not yet sent, those that run, and news that nobody has taken."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self.waiting = deque(requests)
        self.first = requests[0].uid
        self.left = len(requests)
        self.running: set[int] = set()
        self.news: list[CompletionDelta] = []
        self.failure: RequestError | None = None


class RequestTracker:
    """Several calls may be open at a time, such as two streams that are read in turn; all from one thread."""

    def __init__(
        self, backend: EngineClient, detokenizer: Detokenizer, *, window: int, max_tokens: int
    ) -> None:
        """At most ``window`` requests and ``max_tokens`` tokens of prompts (or one request) are sent ahead.

        That is as many as the scheduler is meant to hold: it would refuse more.
        """
        self._backend = backend
        self._detokenizer = detokenizer
        self._window = window
        self._max_tokens = max_tokens
        self._owners: dict[int, _Call] = {}
        self._prompts: dict[int, int] = {}
        """Lengths of their prompts, in tokens."""
        self._tokens = 0

    def run(self, requests: list[GenerateRequest]) -> Generator[list[CompletionDelta], None, None]:
        """News of ``requests``, whose uids count upwards, step by step until each has ended.

        Closing the generator ends those that still run. Raises RequestError when one of them fails, and
        Unavailable when a rank has ended or hangs; either ends the others.
        """
        if not requests:
            return
        call = _Call(requests)
        try:
            while call.left:
                self._submit(call)
                if not call.news and call.failure is None:
                    self._turn()
                if call.failure is not None:
                    raise call.failure
                news, call.news = call.news, []
                if news:
                    call.left -= sum(each.finish_reason is not None for each in news)
                    yield news
        finally:
            self._abandon(call)

    def _submit(self, call: _Call) -> None:
        while call.waiting and self._has_room(prompt := _prompt_tokens(call.waiting[0])):
            request = call.waiting.popleft()
            self._owners[request.uid] = call
            self._prompts[request.uid] = prompt
            self._tokens += prompt
            call.running.add(request.uid)
            self._backend.send(request)

    def _has_room(self, prompt: int) -> bool:
        if not self._owners:
            return True
        return len(self._owners) < self._window and self._tokens + prompt <= self._max_tokens

    def _release(self, uid: int) -> _Call | None:
        """A request is not under way any more; whose it was."""
        self._tokens -= self._prompts.pop(uid, 0)
        call = self._owners.pop(uid, None)
        if call is not None:
            call.running.discard(uid)
        return call

    def _turn(self) -> None:
        """Bring one step's news to the calls that they belong to; what belongs to none is of an earlier one."""
        batch, stopped = self._detokenizer.detokenize(self._backend.receive())
        for uid in stopped:
            self._backend.send(AbortRequest(uid=uid, finish=FinishReason.STOP))
        for failed in batch.failed:
            call = self._release(failed.uid)
            if call is not None:
                call.failure = call.failure or _as_error(failed)
        self._take_prompts(batch)
        self._take_rows(batch)

    def _take_prompts(self, batch: TextBatch) -> None:
        """What is told of prompts, which comes before the first token."""
        for prompt in batch.prompt_logprobs:
            if (call := self._owners.get(prompt.uid)) is not None:
                told = tuple(map(to_token_logprob, prompt.tokens))
                call.news.append(CompletionDelta(prompt.uid - call.first, prompt_logprobs=told))

    def _take_rows(self, batch: TextBatch) -> None:
        told = {each.row: (to_token_logprob(each),) for each in batch.logprobs}
        usages = iter(batch.usages)
        for row, (uid, text, token, finish) in enumerate(_rows(batch)):
            usage = next(usages) if finish else None
            call = self._owners.get(uid)
            if call is None:
                continue
            index, token_ids, logprobs = uid - call.first, (token,) if token >= 0 else (), told.get(row, ())
            if usage is None:
                call.news.append(CompletionDelta(index, text, token_ids, logprobs))
            else:
                call.news.append(ended(index, text, token_ids, logprobs, finish, usage))
                self._release(uid)

    def _abandon(self, call: _Call) -> None:
        """End what still runs, so that later calls start afresh."""
        for uid in sorted(call.running):
            self._release(uid)
            self._backend.send(AbortRequest(uid=uid))


def _prompt_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) // Wire.TOKEN.itemsize


def _rows(batch: TextBatch) -> Iterator[tuple[int, str, int, int]]:
    """Of each row its uid, text, token and finish."""
    uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
    tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
    return zip(uids, batch.texts, tokens, batch.finishes, strict=True)


def _as_error(failed: RequestFailed) -> RequestError:
    error = RequestError(failed.message, param=failed.param, code=failed.code)
    error.status, error.kind = failed.status, failed.kind
    return error
