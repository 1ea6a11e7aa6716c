"""Requests in flight of an ``LLM``: sent to the ranks within the queue limits, their outputs sorted by call."""

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np

from skiff_runtime.errors import RequestError
from skiff_runtime.messages import (
    AbortRequest,
    AdapterLoaded,
    AdapterRefused,
    FinishReason,
    GenerateRequest,
    LoadAdapter,
    RequestFailed,
    TextBatch,
    UnloadAdapter,
    Wire,
)
from skiff_runtime.offline.engine_client import EngineClient
from skiff_runtime.offline.outputs import CompletionDelta, final_delta, to_token_logprob
from skiff_runtime.tokenizer.detokenizer import Detokenizer


class _Call:
    """The requests of one call, and the outputs that its caller has not yet received."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self.waiting = deque(requests)
        self.first_uid = requests[0].uid
        self.unfinished = len(requests)
        self.running: set[int] = set()
        self.deltas: list[CompletionDelta] = []
        self.failure: RequestError | None = None
        self.adapter_ids = frozenset(each.adapter_id for each in requests)


class RequestTracker:
    """Runs the requests of several open calls, such as two streams that are read in turn, from one thread."""

    def __init__(
        self, engine: EngineClient, detokenizer: Detokenizer, *, max_requests: int, max_tokens: int
    ) -> None:
        """Have at most ``max_requests`` requests, and ``max_tokens`` prompt tokens, in flight at a time.

        These are the limits of the scheduler's queue, which refuses further requests. A single request is sent even
        if its prompt is longer than ``max_tokens``.
        """
        self._engine = engine
        self._detokenizer = detokenizer
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._calls: dict[int, _Call] = {}
        self._prompt_lengths: dict[int, int] = {}
        self._prompt_tokens = 0
        self._open_calls: list[_Call] = []
        self._loading_adapter = 0
        self._adapter_reply: AdapterLoaded | AdapterRefused | None = None
        self._leaving_adapters: list[int] = []
        """Unloaded adapters that an open call still uses."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were sent to the ranks and have not ended."""
        return len(self._calls)

    def run(self, requests: list[GenerateRequest]) -> Generator[list[CompletionDelta], None, None]:
        """Run ``requests``, whose uids are consecutive, and yield their outputs after each step until all have ended.

        Closing the generator aborts those that still run.

        Raises:
            RequestError: one of the requests has failed; the others are aborted.
            Unavailable: a rank has ended or hangs.
        """
        if not requests:
            return
        call = _Call(requests)
        self._open_calls.append(call)
        try:
            while call.unfinished:
                self._submit(call)
                if not call.deltas and call.failure is None:
                    self._process_step()
                if call.failure is not None:
                    raise call.failure
                deltas, call.deltas = call.deltas, []
                if deltas:
                    call.unfinished -= sum(each.finish_reason is not None for each in deltas)
                    yield deltas
        finally:
            self._abort(call)
            self._open_calls.remove(call)
            self._forget_unused_adapters()

    def load_adapter(self, adapter_id: int, name: str, path: str) -> AdapterLoaded | AdapterRefused:
        """Have the ranks read the LoRA adapter in the directory ``path``, and return their reply; open calls go on meanwhile.

        Raises:
            Unavailable: a rank has ended or hangs.
        """
        self._loading_adapter, self._adapter_reply = adapter_id, None
        self._engine.send(LoadAdapter(uid=adapter_id, adapter_id=adapter_id, name=name, path=path))
        try:
            while self._adapter_reply is None:
                self._process_step()
        except KeyboardInterrupt:
            self._engine.send(UnloadAdapter(adapter_id))  # a late success would leave it in memory
            raise
        finally:
            self._loading_adapter = 0
        return self._adapter_reply

    def unload_adapter(self, adapter_id: int) -> None:
        """Have the ranks forget an adapter, at once or when the last open call that uses it has ended."""
        self._leaving_adapters.append(adapter_id)
        self._forget_unused_adapters()

    def _forget_unused_adapters(self) -> None:
        for adapter_id in [*self._leaving_adapters]:
            if not any(adapter_id in call.adapter_ids for call in self._open_calls):
                self._leaving_adapters.remove(adapter_id)
                self._engine.send(UnloadAdapter(adapter_id))

    def _submit(self, call: _Call) -> None:
        """Send as many of the call's waiting requests as there is room for."""
        while call.waiting and self._has_room(prompt := _count_prompt_tokens(call.waiting[0])):
            request = call.waiting.popleft()
            self._calls[request.uid] = call
            self._prompt_lengths[request.uid] = prompt
            self._prompt_tokens += prompt
            call.running.add(request.uid)
            self._engine.send(request)

    def _has_room(self, prompt: int) -> bool:
        if not self._calls:
            return True
        return len(self._calls) < self._max_requests and self._prompt_tokens + prompt <= self._max_tokens

    def _forget(self, uid: int) -> _Call | None:
        """Remove a request that has ended, and return its call, if it was in flight."""
        self._prompt_tokens -= self._prompt_lengths.pop(uid, 0)
        call = self._calls.pop(uid, None)
        if call is not None:
            call.running.discard(uid)
        return call

    def _process_step(self) -> None:
        """Receive one step's tokens and add the outputs to their calls; rows of aborted requests are dropped."""
        batch, stopped = self._detokenizer.detokenize(self._engine.receive())
        for uid in stopped:
            self._engine.send(AbortRequest(uid=uid, finish=FinishReason.STOP))
        for failed in batch.failed:
            call = self._forget(failed.uid)
            if call is not None:
                call.failure = call.failure or _to_error(failed)
        for reply in batch.adapters:
            if reply.adapter_id == self._loading_adapter:
                self._adapter_reply = reply
        # The log-probabilities of a prompt come before the first token of its completion.
        self._add_prompt_logprobs(batch)
        for pooled in batch.pooled:
            if (call := self._calls.get(pooled.uid)) is not None:
                call.deltas.append(CompletionDelta(pooled.uid - call.first_uid, vector=pooled.data))
        self._add_rows(batch)

    def _add_prompt_logprobs(self, batch: TextBatch) -> None:
        for prompt in batch.prompt_logprobs:
            if (call := self._calls.get(prompt.uid)) is not None:
                logprobs = tuple(map(to_token_logprob, prompt.tokens))
                call.deltas.append(CompletionDelta(prompt.uid - call.first_uid, prompt_logprobs=logprobs))

    def _add_rows(self, batch: TextBatch) -> None:
        logprobs_by_row = {each.row: (to_token_logprob(each),) for each in batch.logprobs}
        usages = iter(batch.usages)
        for row, (uid, text, token, finish) in enumerate(_iterate_rows(batch)):
            # A batch has one usage for each row that finishes, so this one is consumed even if the row is dropped.
            usage = next(usages) if finish else None
            call = self._calls.get(uid)
            if call is None:
                continue
            delta = CompletionDelta(
                uid - call.first_uid, text, (token,) if token >= 0 else (), logprobs_by_row.get(row, ())
            )
            if usage is None:
                call.deltas.append(delta)
            else:
                call.deltas.append(final_delta(delta, finish, usage))
                self._forget(uid)

    def _abort(self, call: _Call) -> None:
        """Abort the call's requests that still run, so that later calls find the queue empty."""
        for uid in sorted(call.running):
            self._forget(uid)
            self._engine.send(AbortRequest(uid=uid))


def _count_prompt_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) // Wire.TOKEN.itemsize


def _iterate_rows(batch: TextBatch) -> Iterator[tuple[int, str, int, int]]:
    """Yield uid, text, token (negative for none) and finish reason of each row."""
    uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
    tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
    return zip(uids, batch.texts, tokens, batch.finishes, strict=True)


def _to_error(failed: RequestFailed) -> RequestError:
    error = RequestError(failed.message, param=failed.param, code=failed.code)
    error.status, error.kind = failed.status, failed.kind
    return error
