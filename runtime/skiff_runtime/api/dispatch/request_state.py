"""State of a request in flight: its metadata, its choices, and how it ended."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from skiff_runtime.api.dispatch.response_writers import ChoiceWriter, NullChoiceWriter
from skiff_runtime.api.formats.chunks import sum_usage
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.messages import FinishReason, RequestFailed, Usage
from skiff_runtime.messages.transport import Sender
from skiff_runtime.metrics.labels import AbortReason, Endpoint, Outcome
from skiff_runtime.prompt_blocks import PromptBlocks

_NULL_WRITER: Final = NullChoiceWriter()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetadata:
    """Properties of a request beside its body. ``endpoint`` is None for the service's own health check.

    ``deadline_seconds``: 0 for no deadline. ``trace``: W3C trace context headers by name. ``key``: digest of its API
    key, b"" without one. ``cache_salt``: namespace of the prefix cache, see ``auth.derive_cache_namespace``.
    ``prompt_blocks``: those of its prompt, while a router watches.
    """

    request_id: str
    endpoint: Endpoint | None
    deadline_seconds: float = 0.0
    trace: dict[str, str] | None = None
    key: bytes = b""
    cache_salt: bytes = b""
    prompt_blocks: PromptBlocks | None = None


class RequestState:
    """One accepted request, until all of its choices have ended.

    ``choices`` holds those that have not ended, by uid. ``ttft`` is the time to the first token in seconds.
    ``abort_reason`` is None unless the service or the client ended the request early.
    """

    __slots__ = (
        "_timer",
        "_usages",
        "abort_reason",
        "choices",
        "failure",
        "finish",
        "first_uid",
        "metadata",
        "spec",
        "started",
        "ttft",
    )

    def __init__(self, first_uid: int, spec: RequestSpec, metadata: RequestMetadata) -> None:
        """``first_uid``: uid of the first choice; those of the others follow it."""
        self.first_uid = first_uid
        self.metadata = metadata
        self.spec = spec
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.abort_reason: AbortReason | None = None
        self.failure: RequestFailed | None = None
        self.finish = FinishReason.RUNNING
        self.choices: dict[int, ChoiceState] = {}
        self._usages = [Usage(0, 0, 0)] * spec.num_choices
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Token counts of the whole request, once it has ended."""
        return sum_usage(self._usages, self.spec.copies)

    @property
    def longest_choice(self) -> int:
        """Number of generated tokens of its longest choice, once it has ended."""
        return max(usage.completion_tokens for usage in self._usages)

    def add_choice(self, uid: int, writer: ChoiceWriter, tokenizer: Sender) -> "ChoiceState":
        """Add a choice that was sent to ``tokenizer``, and return its state."""
        self.choices[uid] = choice = ChoiceState(self, writer, tokenizer)
        return choice

    def remove_choice(self, uid: int) -> None:
        """Remove a choice that has ended."""
        del self.choices[uid]

    def record_first_token(self, now: float) -> float:
        """Record the arrival of the first token at ``now``, and return the time to first token in seconds."""
        self.ttft = now - self.started
        return self.ttft

    def record_abort(self, reason: AbortReason) -> bool:
        """Record why the request ends early. Returns False if another reason was recorded before."""
        if self.abort_reason is not None:
            return False
        self.abort_reason = reason
        return True

    def record_failure(self, failure: RequestFailed) -> None:
        """Record an error of one choice; the first one is that of the request."""
        if self.failure is None:
            self.failure = failure

    def record_finish(self, uid: int, finish: FinishReason, usage: Usage) -> None:
        """Record how choice ``uid`` finished, and its token counts. If one choice was aborted, the request counts as aborted."""
        self._usages[uid - self.first_uid] = usage
        if self.finish is not FinishReason.ABORT:
            self.finish = finish

    def outcome(self) -> Outcome:
        """Return how the request ended."""
        if self.abort_reason is AbortReason.DISCONNECT or self.finish is FinishReason.ABORT:
            return Outcome.ABORTED
        if self.failure is None:
            return Outcome.FINISHED
        return Outcome.REJECTED if self.failure.status < 500 else Outcome.FAILED

    def log_fields(self) -> dict[str, object]:
        """Return the fields of the log event for the request's end."""
        if self.failure is not None:
            fields: dict[str, object] = {"status": self.failure.status, "error": self.failure.message}
        else:
            usage = self.usage
            fields = {
                "finish": self.finish.name.lower(),
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        if self.abort_reason is not None:
            fields["ended_by"] = self.abort_reason
        if self.spec.num_choices > 1:
            fields["choices"] = self.spec.num_choices
        if self.ttft is not None:
            fields["ttft_seconds"] = self.ttft
        if self.spec.user is not None:
            fields["user"] = self.spec.user
        return fields

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the request's timer, and cancel the one before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class ChoiceState:
    """One choice of a request, under its own uid. ``tokenizer``: the process that it, and so its abort, was sent to.

    ``started``, ``first_token`` and ``last_token`` are moments of ``time.perf_counter``, 0 while they are ahead: the launch
    of its first step, and the arrivals of its first token and of its last one so far.
    """

    __slots__ = ("first_token", "last_token", "request", "started", "tokenizer", "writer")

    def __init__(self, request: RequestState, writer: ChoiceWriter, tokenizer: Sender) -> None:
        self.request = request
        self.writer = writer
        self.tokenizer = tokenizer
        self.started = self.first_token = self.last_token = 0.0

    def discard_output(self) -> bool:
        """Discard all further output of this choice. Returns False if it is discarded already."""
        if self.writer is _NULL_WRITER:
            return False
        self.writer = _NULL_WRITER
        return True
