"""Requests in flight: admission, the way to the tokenizers, and the way of each row back to its request."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import asdict

from skiff_runtime import log
from skiff_runtime.api.generation import Generation, Prompt
from skiff_runtime.api.sinks import NullSink, Sink
from skiff_runtime.api.status import ServiceStatus
from skiff_runtime.api.usage import total_usage
from skiff_runtime.errors import InvalidRequest, QueueFull, RequestError
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    Finish,
    RequestFailed,
    TextBatch,
    TextLogprobs,
    TokenizeRequest,
    Usage,
    Wire,
)
from skiff_runtime.metrics import Endpoint, Metrics, Outcome
from skiff_runtime.transport import Sender, TransportError

_NOBODY: Final = NullSink()


class Flight:
    """One accepted request, until all of its choices have ended. ``endpoint`` None: the service's own health check."""

    __slots__ = (
        "aborted",
        "choices",
        "copies",
        "endpoint",
        "failure",
        "finish",
        "first",
        "request_id",
        "started",
        "ttft",
        "usages",
        "user",
    )

    def __init__(
        self, first: int, generation: Generation, endpoint: Endpoint | None, request_id: str
    ) -> None:
        """``first``: uid of the first choice; those of the others follow."""
        self.first = first
        self.endpoint = endpoint
        self.request_id = request_id
        self.user = generation.user
        self.copies = generation.copies
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.aborted = False
        self.failure: RequestFailed | None = None
        self.finish = Finish.RUNNING
        self.choices: dict[int, Choice] = {}
        self.usages = [Usage(0, 0, 0)] * generation.choices

    def outcome(self) -> Outcome:
        """How it ended."""
        if self.aborted or self.finish is Finish.ABORT:
            return Outcome.ABORTED
        if self.failure is None:
            return Outcome.FINISHED
        return Outcome.REJECTED if self.failure.status < 500 else Outcome.FAILED

    def facts(self) -> dict[str, object]:
        """What the log tells of its end."""
        if self.failure is not None:
            facts: dict[str, object] = {"status": self.failure.status, "error": self.failure.message}
        else:
            facts = {"finish": self.finish.name.lower(), **asdict(total_usage(self.usages, self.copies))}
        if len(self.usages) > 1:
            facts["choices"] = len(self.usages)
        if self.ttft is not None:
            facts["ttft_seconds"] = self.ttft
        if self.user is not None:
            facts["user"] = self.user
        return facts


class Choice:
    """One answer of a request, under its own uid. An abort goes the way that the request went."""

    __slots__ = ("flight", "last_token", "sink", "tokenizer")

    def __init__(self, flight: Flight, sink: Sink, tokenizer: Sender) -> None:
        self.flight = flight
        self.sink = sink
        self.tokenizer = tokenizer
        self.last_token = 0.0


class Dispatcher:
    """Bounded: at most ``capacity`` choices are in flight, a request beyond that is refused with 429."""

    def __init__(
        self, tokenizers: list[Sender], *, capacity: int, status: ServiceStatus, metrics: Metrics
    ) -> None:
        self._tokenizers = tokenizers
        self._capacity = capacity
        self._status = status
        self._metrics = metrics
        self._choices: dict[int, Choice] = {}
        self._next_uid = 1
        self._next_tokenizer = 0
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._choices)

    def submit(
        self, generation: Generation, sinks: Sequence[Sink], *, endpoint: Endpoint | None, request_id: str
    ) -> Flight:
        """Accept a request with a sink for each choice. Raises ``Unavailable``, ``InvalidRequest`` or ``QueueFull``."""
        self._status.check_open()
        self._check_room(len(sinks))
        flight = Flight(self._next_uid, generation, endpoint, request_id)
        copies = generation.copies
        try:
            for index, prompt in enumerate(generation.prompts):
                self._launch(flight, prompt, generation, sinks[index * copies : (index + 1) * copies])
        except TransportError:
            self.abort(flight)
            raise
        return flight

    def _check_room(self, choices: int) -> None:
        if choices > self._capacity:
            raise InvalidRequest(
                f"the request asks for {choices} answers, but only {self._capacity} can be served or wait at a time"
            )
        if len(self._choices) + choices > self._capacity:
            raise QueueFull(f"{len(self._choices)} requests are being served or wait already; retry shortly")

    def _launch(self, flight: Flight, prompt: Prompt, generation: Generation, sinks: Sequence[Sink]) -> None:
        """Send one prompt to a tokenizer; its choices are in flight from then on."""
        uid = self._next_uid
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
        flight.aborted = True
        self._silence(flight)

    def _silence(self, flight: Flight) -> None:
        """End what is left of a request without telling anyone."""
        for uid, choice in flight.choices.items():
            if choice.sink is not _NOBODY:
                choice.sink = _NOBODY
                choice.tokenizer.send(AbortRequest(uid=uid))

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
                choice.sink.finish(text, token, logprobs, Finish(finish), usage)
                self._finished(choice.flight, uid, Finish(finish), usage)
        for failure in batch.failed:
            self.fail(failure)
        self._metrics.note_step(batch.stats, generated=len(tokens) - tokens.count(NO_TOKEN))

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
            self._fail(choice, failure)
            self._silence(choice.flight)

    def _fail(self, choice: Choice, failure: RequestFailed) -> None:
        if choice.flight.failure is None:
            choice.flight.failure = failure
        choice.sink.fail(failure)
        self._land(failure.uid)

    def fail_all(self, error: RequestError) -> None:
        """End every request in flight with ``error``."""
        for uid, choice in list(self._choices.items()):
            self._fail(choice, RequestFailed.of(uid, error))

    def _note_first_token(self, flight: Flight, now: float) -> None:
        flight.ttft = now - flight.started
        if flight.endpoint is not None:
            self._metrics.ttft.observe(flight.ttft)

    def _finished(self, flight: Flight, uid: int, finish: Finish, usage: Usage) -> None:
        self._metrics.note_usage(usage)
        flight.usages[uid - flight.first] = usage
        flight.finish = finish
        self._land(uid)

    def _land(self, uid: int) -> None:
        """A choice has had its terminal reply; with the last one its request has ended."""
        flight = self._choices.pop(uid).flight
        del flight.choices[uid]
        if not self._choices:
            self._idle.set()
        if not flight.choices and flight.endpoint is not None:
            self._ended(flight, flight.endpoint)

    def _ended(self, flight: Flight, endpoint: Endpoint) -> None:
        seconds = time.perf_counter() - flight.started
        outcome = flight.outcome()
        self._metrics.note_request(endpoint, outcome, seconds)
        log.event(
            "request",
            id=flight.request_id,
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
