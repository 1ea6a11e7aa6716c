"""Dispatcher: admission of requests, their dispatch to tokenizers, and delivery of output rows to response writers."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from skiff_runtime import log
from skiff_runtime.api.dispatch.request_state import ChoiceState, RequestMetadata, RequestState
from skiff_runtime.api.dispatch.response_writers import ChoiceWriter
from skiff_runtime.api.dispatch.retry_after import RetryAfterEstimator
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.formats.request_spec import Prompt, RequestSpec
from skiff_runtime.errors import DeadlineExceeded, InvalidRequest, QueueFull, RequestError
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    FinishReason,
    RequestFailed,
    TextBatch,
    TextLogprobs,
    TokenizeRequest,
    Usage,
    Wire,
)
from skiff_runtime.messages.transport import MessageNotEncodable, Sender, TransportError
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import AbortReason, Endpoint, Outcome

ABORT_CONFIRM_SECONDS: Final = 5.0
"""Time that the scheduler has to confirm an abort, before the client gets an error instead."""
DISCONNECT_CONFIRM_SECONDS: Final = 60.0
"""The same for a request whose client has disconnected."""


class Dispatcher:
    """Requests in flight, limited to ``capacity`` choices; a request beyond that is rejected with status 429.

    A request ends with the last of its choices. A choice stays in flight, and holds capacity, until its terminal reply
    (a finish reason or an error) arrives, even after its abort was sent: until then it occupies the scheduler.
    """

    def __init__(
        self,
        tokenizers: list[Sender],
        *,
        capacity: int,
        status: ServiceStatus,
        metrics: Metrics,
        on_end: Callable[[RequestState], None] | None = None,
    ) -> None:
        """``on_end`` is called with each request that has ended, except the service's own health checks."""
        self._tokenizers = tokenizers
        self._capacity = capacity
        self._status = status
        self._metrics = metrics
        self._on_end = on_end
        self._retry_after = RetryAfterEstimator()
        self._choices: dict[int, ChoiceState] = {}
        self._next_uid = 1
        self._next_tokenizer = 0
        self._idle = asyncio.Event()
        self._adapter_choices = Counter[int]()
        self.on_adapter_idle: Callable[[int], None] = _ignore_idle_adapter
        """Called with the id of a LoRA adapter when its last choice in flight has ended."""

    def __len__(self) -> int:
        return len(self._choices)

    def count_adapter_choices(self, adapter_id: int) -> int:
        """Return the number of choices in flight that run on a LoRA adapter."""
        return self._adapter_choices[adapter_id]

    def prompt_bytes(self, uid: int) -> int:
        """Return the length of the text of a choice's prompt; 0 if it is not known, or the choice has ended."""
        choice = self._choices.get(uid)
        blocks = None if choice is None else choice.request.metadata.prompt_blocks
        return 0 if blocks is None else blocks.text_bytes

    def submit(
        self, spec: RequestSpec, writers: Sequence[ChoiceWriter], metadata: RequestMetadata
    ) -> RequestState:
        """Accept a request, with a writer for each choice, and send its prompts to tokenizers.

        Raises:
            Unavailable: The service does not accept requests.
            InvalidRequest: The request has more choices than the capacity, or a value that no message can carry.
            QueueFull: Too many choices are in flight.
        """
        self._status.check_accepts_requests()
        self._check_capacity(len(writers))
        request = RequestState(self._next_uid, spec, metadata)
        copies = spec.copies
        try:
            for index, prompt in enumerate(spec.prompts):
                self._send_prompt(request, prompt, writers[index * copies : (index + 1) * copies])
        except TransportError:
            self.abort(request)
            raise
        except MessageNotEncodable as error:
            self.abort(request)
            raise InvalidRequest(f"the request cannot be processed: {error}") from None
        if metadata.deadline_seconds:
            self._set_timer(request, metadata.deadline_seconds, self._expire)
        return request

    def _check_capacity(self, choices: int) -> None:
        if choices > self._capacity:
            raise InvalidRequest(
                f"the request asks for {choices} choices, but only {self._capacity} can run or wait at a time"
            )
        if len(self._choices) + choices > self._capacity:
            raise QueueFull(
                f"{len(self._choices)} requests run or wait already",
                retry_after_seconds=self._retry_after.retry_after_seconds(),
            )

    def _send_prompt(self, request: RequestState, prompt: Prompt, writers: Sequence[ChoiceWriter]) -> None:
        """Send one prompt to the next tokenizer. Its choices, one for each writer, are in flight from then on."""
        uid, spec = self._next_uid, request.spec
        tokenizer = self._tokenizers[self._next_tokenizer]
        self._next_uid += len(writers)
        self._next_tokenizer = (self._next_tokenizer + 1) % len(self._tokenizers)
        tokenizer.send(
            TokenizeRequest(
                uid=uid,
                prompt=prompt,
                sampling=spec.sampling,
                text=spec.text,
                copies=len(writers),
                priority=spec.priority,
                grammar=spec.grammar,
                cache_salt=request.metadata.cache_salt,
                options=spec.prompt_options,
                pooling=spec.pooling,
                # The blocks are those of one prompt; of several in a body, each would have another beginning.
                prompt_blocks=request.metadata.prompt_blocks if len(spec.prompts) == 1 else None,
                adapter_id=spec.adapter_id,
            )
        )
        if spec.adapter_id:
            self._adapter_choices[spec.adapter_id] += len(writers)
        for index, writer in enumerate(writers):
            self._choices[uid + index] = request.add_choice(uid + index, writer, tokenizer)

    async def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is in flight. Returns False on timeout."""
        self._idle.clear()
        if self._choices:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        return not self._choices

    def abort(self, request: RequestState) -> None:
        """Abort a request whose client has disconnected; no-op once it has ended."""
        if request.choices:
            self._record_abort(request, AbortReason.DISCONNECT)
            self._discard(request)

    def abort_requests(self, request_id: str | None, *, key: bytes | None) -> int:
        """Abort requests on behalf of POST /abort; their clients get the text so far. Returns the number of requests.

        ``request_id``: an X-Request-Id or the ID of a response; None for all. ``key``: digest of the API key whose
        requests alone are aborted; None for those of every client.
        """
        requests = {choice.request.first_uid: choice.request for choice in self._choices.values()}
        count = 0
        for request in requests.values():
            metadata = request.metadata
            matches = request_id in (None, metadata.request_id, request.spec.formatter.id)
            running = request.abort_reason is None and metadata.endpoint is not None
            if matches and running and key in (None, metadata.key):
                self._record_abort(request, AbortReason.ENDPOINT)
                self._end(request, FinishReason.ABORT)
                count += 1
        return count

    def _expire(self, request: RequestState) -> None:
        self._record_abort(request, AbortReason.DEADLINE)
        self._end(request, FinishReason.TIMEOUT)

    def _end(self, request: RequestState, finish: FinishReason) -> None:
        """End a request early, at whichever process it is; its client gets the output so far."""
        # The abort follows the request through the same processes, so it cannot overtake it.
        for uid, choice in request.choices.items():
            choice.tokenizer.send(AbortRequest(uid=uid, finish=finish))
        self._set_timer(request, ABORT_CONFIRM_SECONDS, self._give_up)

    def _discard(self, request: RequestState) -> None:
        """End what is left of a request, and discard its output."""
        for uid, choice in request.choices.items():
            if choice.discard_output():
                choice.tokenizer.send(AbortRequest(uid=uid))
        if request.choices:
            self._set_timer(request, DISCONNECT_CONFIRM_SECONDS, self._give_up)

    def _give_up(self, request: RequestState) -> None:
        """End a request whose abort was not confirmed in time with an error."""
        log.warning("abort_unconfirmed", id=request.metadata.request_id, choices=len(request.choices))
        error = DeadlineExceeded("the request was aborted, but the service did not confirm that in time")
        for uid, choice in list(request.choices.items()):
            self._fail(choice, RequestFailed.of(uid, error))

    def _set_timer(self, request: RequestState, seconds: float, then: Callable[[RequestState], None]) -> None:
        request.set_timer(asyncio.get_running_loop().call_later(seconds, then, request))

    def _record_abort(self, request: RequestState, reason: AbortReason) -> None:
        if request.record_abort(reason) and request.metadata.endpoint is not None:
            self._metrics.record_abort(reason)

    def deliver(self, batch: TextBatch) -> None:
        """Pass each row of a step's output to the writer of its choice. Rows of unknown uids are ignored."""
        now = time.perf_counter()
        choices, itl = self._choices, self._metrics.itl
        self._deliver_prompts(batch)
        usages = iter(batch.usages)
        tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
        uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
        row_logprobs = _by_row(batch.logprobs, len(uids))
        rows = zip(uids, batch.texts, tokens, batch.finishes, row_logprobs, strict=True)
        for uid, text, token, finish, logprobs in rows:
            choice = choices.get(uid)
            # Taken for unknown uids too: ``usages`` has an entry for each finished row.
            usage = next(usages) if finish else None
            if choice is None:
                continue
            if token != NO_TOKEN:
                if choice.last_token:
                    itl.observe(now - choice.last_token)
                else:
                    self._record_first_token(choice, now)
                choice.last_token = now
            if usage is None:
                choice.writer.write(text, token, logprobs)
            else:
                failure = choice.writer.finish(text, token, logprobs, FinishReason(finish), usage)
                if failure is not None:
                    choice.request.record_failure(failure)
                self._finish(choice, uid, FinishReason(finish), usage)
        for failure in batch.failed:
            self.fail(failure)
        self._metrics.record_step(batch.stats, generated=len(tokens) - tokens.count(NO_TOKEN))

    def _deliver_prompts(self, batch: TextBatch) -> None:
        for opened in batch.opened:
            if (choice := self._choices.get(opened.uid)) is not None:
                choice.started = opened.started_at
                choice.writer.start(opened)
        for prompt in batch.prompt_logprobs:
            if (choice := self._choices.get(prompt.uid)) is not None:
                choice.writer.write_prompt_logprobs(prompt.tokens)
        for pooled in batch.pooled:
            if (choice := self._choices.get(pooled.uid)) is not None:
                choice.writer.write_vector(pooled.data)

    def fail(self, failure: RequestFailed) -> None:
        """End the whole request of a choice that failed, with the error of that choice."""
        choice = self._choices.get(failure.uid)
        if choice is not None:
            if failure.status == QueueFull.status and not failure.retry_after_seconds:
                # The scheduler does not know the rate of completions.
                failure = replace(failure, retry_after_seconds=self._retry_after.retry_after_seconds())
            self._fail(choice, failure)
            self._discard(choice.request)

    def _fail(self, choice: ChoiceState, failure: RequestFailed) -> None:
        choice.request.record_failure(failure)
        choice.writer.fail(failure)
        self._remove_choice(failure.uid)

    def fail_all(self, error: RequestError, reason: AbortReason | None = None) -> None:
        """End every request in flight with ``error``. ``reason`` is recorded if the requests are aborted."""
        for uid, choice in list(self._choices.items()):
            if reason is not None:
                self._record_abort(choice.request, reason)
            self._fail(choice, RequestFailed.of(uid, error))

    def _record_first_token(self, choice: ChoiceState, now: float) -> None:
        choice.first_token = now
        request = choice.request
        if request.ttft is None:
            ttft = request.record_first_token(now)
            if request.metadata.endpoint is not None:
                self._metrics.ttft.observe(ttft)

    def _finish(self, choice: ChoiceState, uid: int, finish: FinishReason, usage: Usage) -> None:
        self._metrics.record_usage(usage)
        if choice.first_token:
            self._metrics.record_choice_times(
                started_at=choice.started,
                first_token_at=choice.first_token,
                last_token_at=choice.last_token,
                tokens=usage.completion_tokens,
            )
        choice.request.record_finish(uid, finish, usage)
        self._remove_choice(uid)

    def _remove_choice(self, uid: int) -> None:
        """Remove a choice that has had its terminal reply; with the last one its request has ended."""
        request = self._choices.pop(uid).request
        request.remove_choice(uid)
        if request.spec.adapter_id:
            self._count_adapter_end(request.spec.adapter_id)
        self._retry_after.record_completion()
        if not self._choices:
            self._idle.set()
        if not request.choices:
            request.set_timer(None)
            if request.metadata.endpoint is not None:
                self._record_end(request, request.metadata.endpoint)

    def _count_adapter_end(self, adapter_id: int) -> None:
        self._adapter_choices[adapter_id] -= 1
        if not self._adapter_choices[adapter_id]:
            del self._adapter_choices[adapter_id]
            self.on_adapter_idle(adapter_id)

    def _record_end(self, request: RequestState, endpoint: Endpoint) -> None:
        seconds = time.perf_counter() - request.started
        outcome = request.outcome()
        self._metrics.record_request(endpoint, outcome, seconds)
        if request.failure is None and request.finish is not FinishReason.RUNNING:
            self._metrics.record_finish(request.finish)
            if request.spec.pooling is None:
                self._metrics.record_generation(
                    longest_choice=request.longest_choice,
                    choices=request.spec.copies,
                    max_tokens=request.spec.sampling.max_tokens,
                )
        if request.failure is not None and outcome is Outcome.REJECTED:
            self._metrics.record_rejection(request.failure.status)
        if self._on_end is not None:
            self._on_end(request)
        log.event(
            "request_ended",
            id=request.metadata.request_id,
            endpoint=endpoint,
            outcome=outcome,
            seconds=seconds,
            **request.log_fields(),
        )


def _ignore_idle_adapter(_adapter_id: int) -> None:
    """Do nothing: no adapter manager listens."""


def _by_row(logprobs: list[TextLogprobs], rows: int) -> list[TextLogprobs | None]:
    """Return the log-probabilities of each row, None for rows without; most batches have none at all."""
    by_row: list[TextLogprobs | None] = [None] * rows
    for each in logprobs:
        by_row[each.row] = each
    return by_row
