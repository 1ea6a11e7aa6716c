"""Requests in flight: admission, the way to the tokenizers, and the way of each row back to its request."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from skiff_runtime import log
from skiff_runtime.api.dispatch.request_state import Choice, Flight, RequestMetadata
from skiff_runtime.api.dispatch.response_writers import NullChoiceWriter, Sink
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
from skiff_runtime.messages.transport import Sender, TransportError
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import AbortReason, Endpoint, Outcome

ABORT_CONFIRM_SECONDS: Final = 5.0
"""How long a request that was told to end may take to do so, before its client gets an error."""
DISCONNECT_CONFIRM_SECONDS: Final = 60.0
"""The same, where no client waits."""
_NOBODY: Final = NullChoiceWriter()


class Dispatcher:
    """Bounded: at most ``capacity`` choices are in flight, a request beyond that is refused with 429.

    ``on_end`` is called with each request that has ended, the service's own health checks aside.
    """

    def __init__(
        self,
        tokenizers: list[Sender],
        *,
        capacity: int,
        status: ServiceStatus,
        metrics: Metrics,
        on_end: Callable[[Flight], None] | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._capacity = capacity
        self._status = status
        self._metrics = metrics
        self._on_end = on_end
        self._pace = RetryAfterEstimator()
        self._choices: dict[int, Choice] = {}
        self._next_uid = 1
        self._next_tokenizer = 0
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._choices)

    def submit(self, generation: RequestSpec, sinks: Sequence[Sink], caller: RequestMetadata) -> Flight:
        """Accept a request with a sink for each choice. Raises ``Unavailable``, ``InvalidRequest`` or ``QueueFull``."""
        self._status.check_accepts_requests()
        self._check_room(len(sinks))
        flight = Flight(self._next_uid, generation, caller)
        copies = generation.copies
        try:
            for index, prompt in enumerate(generation.prompts):
                self._launch(flight, prompt, sinks[index * copies : (index + 1) * copies])
        except TransportError:
            self.abort(flight)
            raise
        if caller.deadline_seconds:
            self._wait(flight, caller.deadline_seconds, self._expire)
        return flight

    def _check_room(self, choices: int) -> None:
        if choices > self._capacity:
            raise InvalidRequest(
                f"the request asks for {choices} answers, but only {self._capacity} can be served or wait at a time"
            )
        if len(self._choices) + choices > self._capacity:
            raise QueueFull(
                f"{len(self._choices)} requests are being served or wait already",
                retry_after_seconds=self._pace.wait_seconds(),
            )

    def _launch(self, flight: Flight, prompt: Prompt, sinks: Sequence[Sink]) -> None:
        """Send one prompt to a tokenizer; its choices are in flight from then on."""
        uid, generation = self._next_uid, flight.generation
        tokenizer = self._tokenizers[self._next_tokenizer]
        self._next_uid += len(sinks)
        self._next_tokenizer = (self._next_tokenizer + 1) % len(self._tokenizers)
        tokenizer.send(
            TokenizeRequest(
                uid=uid,
                prompt=prompt,
                sampling=generation.sampling,
                text=generation.text,
                copies=len(sinks),
                priority=generation.priority,
                grammar=generation.grammar,
                cache_salt=flight.caller.cache_salt,
            )
        )
        for index, sink in enumerate(sinks):
            flight.choices[uid + index] = self._choices[uid + index] = Choice(flight, sink, tokenizer)

    async def idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is in flight; False when that took too long."""
        self._idle.clear()
        if self._choices:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        return not self._choices

    def abort(self, flight: Flight) -> None:
        """Nobody listens any more; no-op once all has ended. Choices stay in flight until their end is confirmed."""
        if flight.choices:
            self._note_ending(flight, AbortReason.DISCONNECT)
            self._silence(flight)

    def abort_requests(self, request_id: str | None, *, key: bytes | None) -> int:
        """End the requests with this id, their own or their reply's, or all; their clients get what there is.

        ``key``: only those that came with the key of this digest; None: of every client. Returns how many.
        """
        flights = {choice.flight.first: choice.flight for choice in self._choices.values()}
        count = 0
        for flight in flights.values():
            caller = flight.caller
            named = request_id in (None, caller.request_id, flight.generation.formatter.id)
            if named and flight.ending is None and caller.endpoint and key in (None, caller.key):
                self._note_ending(flight, AbortReason.ENDPOINT)
                self._end(flight, FinishReason.ABORT)
                count += 1
        return count

    def _expire(self, flight: Flight) -> None:
        self._note_ending(flight, AbortReason.DEADLINE)
        self._end(flight, FinishReason.TIMEOUT)

    def _end(self, flight: Flight, finish: FinishReason) -> None:
        """Ask for a request's end, wherever it is; its client is told of it, if need be by us."""
        for uid, choice in flight.choices.items():
            choice.tokenizer.send(AbortRequest(uid=uid, finish=finish))
        self._wait(flight, ABORT_CONFIRM_SECONDS, self._give_up)

    def _silence(self, flight: Flight) -> None:
        """End what is left of a request without telling anyone."""
        for uid, choice in flight.choices.items():
            if choice.sink is not _NOBODY:
                choice.sink = _NOBODY
                choice.tokenizer.send(AbortRequest(uid=uid))
        if flight.choices:
            self._wait(flight, DISCONNECT_CONFIRM_SECONDS, self._give_up)

    def _give_up(self, flight: Flight) -> None:
        """No end was confirmed: whoever still listens gets an error, and the request is forgotten."""
        log.warning("abort_unconfirmed", id=flight.caller.request_id, choices=len(flight.choices))
        error = DeadlineExceeded("the request was to end, but the service did not confirm that in time")
        for uid, choice in list(flight.choices.items()):
            self._fail(choice, RequestFailed.of(uid, error))

    def _wait(self, flight: Flight, seconds: float, then: Callable[[Flight], None]) -> None:
        flight.set_timer(asyncio.get_running_loop().call_later(seconds, then, flight))

    def _note_ending(self, flight: Flight, reason: AbortReason) -> None:
        if flight.ending is None:
            flight.ending = reason
            if flight.caller.endpoint is not None:
                self._metrics.record_abort(reason)

    def deliver(self, batch: TextBatch) -> None:
        """Hand each row to its choice."""
        now = time.perf_counter()
        choices, itl = self._choices, self._metrics.itl
        self._note_prompts(batch)
        usages = iter(batch.usages)
        tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
        uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
        notes = _by_row(batch.logprobs, len(uids))
        rows = zip(uids, batch.texts, tokens, batch.finishes, notes, strict=True)
        for uid, text, token, finish, logprobs in rows:
            choice = choices.get(uid)
            usage = next(usages) if finish else None
            if choice is None:
                continue
            if token != NO_TOKEN:
                if choice.last_token:
                    itl.observe(now - choice.last_token)
                elif choice.flight.ttft is None:
                    self._note_first_token(choice.flight, now)
                choice.last_token = now
            if usage is None:
                choice.sink.write(text, token, logprobs)
            else:
                choice.sink.finish(text, token, logprobs, FinishReason(finish), usage)
                self._finished(choice.flight, uid, FinishReason(finish), usage)
        for failure in batch.failed:
            self.fail(failure)
        self._metrics.record_step(batch.stats, generated=len(tokens) - tokens.count(NO_TOKEN))

    def _note_prompts(self, batch: TextBatch) -> None:
        for opened in batch.opened:
            if (choice := self._choices.get(opened.uid)) is not None:
                choice.sink.open(opened)
        for told in batch.prompt_logprobs:
            if (choice := self._choices.get(told.uid)) is not None:
                choice.sink.prompt(told.tokens)

    def fail(self, failure: RequestFailed) -> None:
        """An error of one choice ends its whole request with that error."""
        choice = self._choices.get(failure.uid)
        if choice is not None:
            if failure.status == QueueFull.status and not failure.retry_after_seconds:
                failure = replace(failure, retry_after_seconds=self._pace.wait_seconds())
            self._fail(choice, failure)
            self._silence(choice.flight)

    def _fail(self, choice: Choice, failure: RequestFailed) -> None:
        if choice.flight.failure is None:
            choice.flight.failure = failure
        choice.sink.fail(failure)
        self._land(failure.uid)

    def fail_all(self, error: RequestError, reason: AbortReason | None = None) -> None:
        """End every request in flight with ``error``; ``reason``: why, where it is no fault."""
        for uid, choice in list(self._choices.items()):
            if reason is not None:
                self._note_ending(choice.flight, reason)
            self._fail(choice, RequestFailed.of(uid, error))

    def _note_first_token(self, flight: Flight, now: float) -> None:
        flight.ttft = now - flight.started
        if flight.caller.endpoint is not None:
            self._metrics.ttft.observe(flight.ttft)

    def _finished(self, flight: Flight, uid: int, finish: FinishReason, usage: Usage) -> None:
        self._metrics.record_usage(usage)
        flight.usages[uid - flight.first] = usage
        flight.finish = finish
        self._land(uid)

    def _land(self, uid: int) -> None:
        """A choice has had its terminal reply; with the last one its request has ended."""
        flight = self._choices.pop(uid).flight
        del flight.choices[uid]
        self._pace.record_completion()
        if not self._choices:
            self._idle.set()
        if not flight.choices:
            flight.set_timer(None)
            if flight.caller.endpoint is not None:
                self._ended(flight, flight.caller.endpoint)

    def _ended(self, flight: Flight, endpoint: Endpoint) -> None:
        seconds = time.perf_counter() - flight.started
        outcome = flight.outcome()
        self._metrics.record_request(endpoint, outcome, seconds)
        if flight.failure is not None and outcome is Outcome.REJECTED:
            self._metrics.record_rejection(flight.failure.status)
        if self._on_end is not None:
            self._on_end(flight)
        log.event(
            "request",
            id=flight.caller.request_id,
            endpoint=endpoint,
            outcome=outcome,
            seconds=seconds,
            **flight.facts(),
        )


def _by_row(logprobs: list[TextLogprobs], rows: int) -> list[TextLogprobs | None]:
    """The log-probabilities of each row, for most batches none."""
    told: list[TextLogprobs | None] = [None] * rows
    for each in logprobs:
        told[each.row] = each
    return told
