"""Requests in flight: admission, the way to the tokenizers, and the way of each row back to its request."""

import asyncio
import contextlib
import time
from typing import Final

import numpy as np

from skiff_runtime import log
from skiff_runtime.api.generation import Generation
from skiff_runtime.api.sinks import NullSink, Sink
from skiff_runtime.api.status import ServiceStatus
from skiff_runtime.errors import QueueFull, RequestError
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    Finish,
    RequestFailed,
    TextBatch,
    TokenizeRequest,
    Usage,
    Wire,
)
from skiff_runtime.metrics import Endpoint, Metrics, Outcome
from skiff_runtime.transport import Sender

_NOBODY: Final = NullSink()


class Flight:
    """One accepted request, until its terminal reply. ``endpoint`` None: the service's own health check."""

    __slots__ = ("aborted", "endpoint", "last_token", "request_id", "sink", "started", "ttft", "user")

    def __init__(self, sink: Sink, endpoint: Endpoint | None, request_id: str, user: str | None) -> None:
        self.sink = sink
        self.endpoint = endpoint
        self.request_id = request_id
        self.user = user
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.last_token = 0.0
        self.aborted = False


class Dispatcher:
    """Bounded: at most ``capacity`` requests are in flight, the next one is refused with 429."""

    def __init__(
        self, tokenizers: list[Sender], *, capacity: int, status: ServiceStatus, metrics: Metrics
    ) -> None:
        self._tokenizers = tokenizers
        self._capacity = capacity
        self._status = status
        self._metrics = metrics
        self._flights: dict[int, Flight] = {}
        self._next_uid = 1
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._flights)

    def submit(
        self, generation: Generation, sink: Sink, *, endpoint: Endpoint | None, request_id: str
    ) -> int:
        """Accept a request; its uid. Raises ``Unavailable`` or ``QueueFull``."""
        self._status.check_open()
        if len(self._flights) >= self._capacity:
            raise QueueFull(f"{self._capacity} requests are being served or wait already; retry shortly")
        uid = self._next_uid
        self._next_uid += 1
        self._tokenizer(uid).send(
            TokenizeRequest(
                uid=uid, prompt=generation.prompt, sampling=generation.sampling, text=generation.text
            )
        )
        self._flights[uid] = Flight(sink, endpoint, request_id, generation.user)
        return uid

    async def idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is in flight; False when that took too long."""
        self._idle.clear()
        if self._flights:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        return not self._flights

    def abort(self, uid: int) -> None:
        """Nobody listens to ``uid`` any more; no-op once it has ended. It stays in flight until that is confirmed."""
        flight = self._flights.get(uid)
        if flight is None or flight.aborted:
            return
        flight.aborted = True
        flight.sink = _NOBODY
        self._tokenizer(uid).send(AbortRequest(uid=uid))

    def deliver(self, batch: TextBatch) -> None:
        """Hand each row to its request."""
        now = time.perf_counter()
        flights, itl = self._flights, self._metrics.itl
        usages = iter(batch.usages)
        tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
        uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
        for uid, text, token, finish in zip(uids, batch.texts, tokens, batch.finishes, strict=True):
            flight = flights.pop(uid, None) if finish else flights.get(uid)
            usage = next(usages) if finish else None
            if flight is None:
                continue
            if token != NO_TOKEN:
                if flight.ttft is None:
                    self._note_first_token(flight, now)
                else:
                    itl.observe(now - flight.last_token)
                flight.last_token = now
            if usage is None:
                flight.sink.write(text, token)
            else:
                flight.sink.finish(text, token, Finish(finish), usage)
                self._finished(flight, Finish(finish), usage)
        for failure in batch.failed:
            self.fail(failure)
        self._metrics.note_step(batch.stats, generated=len(tokens) - tokens.count(NO_TOKEN))

    def fail(self, failure: RequestFailed) -> None:
        """End one request with an error."""
        flight = self._flights.pop(failure.uid, None)
        if flight is not None:
            flight.sink.fail(failure)
            refused = failure.status < 500
            outcome = Outcome.ABORTED if flight.aborted else Outcome.REJECTED if refused else Outcome.FAILED
            self._ended(flight, outcome, status=failure.status, error=failure.message)

    def fail_all(self, error: RequestError) -> None:
        """End every request in flight with ``error``."""
        for uid in list(self._flights):
            self.fail(RequestFailed.of(uid, error))

    def _tokenizer(self, uid: int) -> Sender:
        """Always the same one for a request, so that an abort never overtakes it."""
        return self._tokenizers[uid % len(self._tokenizers)]

    def _note_first_token(self, flight: Flight, now: float) -> None:
        flight.ttft = now - flight.started
        if flight.endpoint is not None:
            self._metrics.ttft.observe(flight.ttft)

    def _finished(self, flight: Flight, finish: Finish, usage: Usage) -> None:
        self._metrics.note_usage(usage)
        ended = Outcome.ABORTED if flight.aborted or finish is Finish.ABORT else Outcome.FINISHED
        self._ended(
            flight,
            ended,
            finish=finish.name.lower(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _ended(self, flight: Flight, outcome: Outcome, **facts: object) -> None:
        if not self._flights:
            self._idle.set()
        if flight.endpoint is None:
            return
        seconds = time.perf_counter() - flight.started
        self._metrics.note_request(flight.endpoint, outcome, seconds)
        if flight.ttft is not None:
            facts["ttft_seconds"] = flight.ttft
        if flight.user is not None:
            facts["user"] = flight.user
        log.event(
            "request",
            id=flight.request_id,
            endpoint=flight.endpoint,
            outcome=outcome,
            seconds=seconds,
            **facts,
        )
