"""A request in flight: who asked, its choices, and how it ended."""

import asyncio
import time
from dataclasses import dataclass

from msgspec.structs import asdict

from skiff_runtime.api.dispatch.response_writers import Sink
from skiff_runtime.api.formats.chunks import sum_usage
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.messages import FinishReason, RequestFailed, Usage
from skiff_runtime.messages.transport import Sender
from skiff_runtime.metrics.labels import AbortReason, Endpoint, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetadata:
    """What a request says beside its body. ``endpoint`` None: the service's own health check.

    ``deadline_seconds`` 0: none. ``trace``: W3C trace context, by header name. ``key``: digest of its API key, b"" for
    none. ``cache_salt``: the namespace of the prefix cache, see ``principal.derive_cache_namespace``.
    """

    request_id: str
    endpoint: Endpoint | None
    deadline_seconds: float = 0.0
    trace: dict[str, str] | None = None
    key: bytes = b""
    cache_salt: bytes = b""


class Flight:
    """One accepted request, until all of its choices have ended."""

    __slots__ = (
        "caller",
        "choices",
        "ending",
        "failure",
        "finish",
        "first",
        "generation",
        "started",
        "timer",
        "ttft",
        "usages",
    )

    def __init__(self, first: int, generation: RequestSpec, caller: RequestMetadata) -> None:
        """``first``: uid of the first choice; those of the others follow."""
        self.first = first
        self.caller = caller
        self.generation = generation
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.ending: AbortReason | None = None
        self.failure: RequestFailed | None = None
        self.finish = FinishReason.RUNNING
        self.choices: dict[int, Choice] = {}
        self.usages = [Usage(0, 0, 0)] * generation.num_choices
        self.timer: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Token counts of the whole request, once it has ended."""
        return sum_usage(self.usages, self.generation.copies)

    def outcome(self) -> Outcome:
        """How it ended."""
        if self.ending is AbortReason.DISCONNECT or self.finish is FinishReason.ABORT:
            return Outcome.ABORTED
        if self.failure is None:
            return Outcome.FINISHED
        return Outcome.REJECTED if self.failure.status < 500 else Outcome.FAILED

    def facts(self) -> dict[str, object]:
        """What the log tells of its end."""
        if self.failure is not None:
            facts: dict[str, object] = {"status": self.failure.status, "error": self.failure.message}
        else:
            facts = {"finish": self.finish.name.lower(), **asdict(self.usage)}
        if self.ending is not None:
            facts["ended_by"] = self.ending
        if len(self.usages) > 1:
            facts["choices"] = len(self.usages)
        if self.ttft is not None:
            facts["ttft_seconds"] = self.ttft
        if self.generation.user is not None:
            facts["user"] = self.generation.user
        return facts

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Wait for this instead of what was waited for."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


class Choice:
    """One answer of a request, under its own uid. An abort goes the way that the request went."""

    __slots__ = ("flight", "last_token", "sink", "tokenizer")

    def __init__(self, flight: Flight, sink: Sink, tokenizer: Sender) -> None:
        self.flight = flight
        self.sink = sink
        self.tokenizer = tokenizer
        self.last_token = 0.0
