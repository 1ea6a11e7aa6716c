"""Record of one streamed response: the arrival time of each part, and the outcome."""

import asyncio
from typing import Final

import msgspec

from skiff_runtime.errors import SkiffError
from skiff_runtime.sse import DONE, EventDecoder

OK: Final = ""
MAX_ERROR_BYTES: Final = 1 << 16


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class RequestRecord:
    """Parses the response to one request as it arrives, and keeps its times, in seconds of a monotonic clock.

    ``failure`` is ``OK`` after a complete response, otherwise the kind of failure, such as "http 429" or "timeout".
    ``itls`` are the inter-token latencies.
    """

    def __init__(self, scheduled_at: float, expected_tokens: int | None) -> None:
        """``expected_tokens``: number of tokens of a complete response, or None if the model may stop earlier."""
        self.scheduled_at = scheduled_at
        self.sent_at = scheduled_at
        self.first_at = 0.0
        self.last_at = 0.0
        self.ended_at = 0.0
        self.itls: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.failure = OK
        self.detail = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected_tokens = expected_tokens
        self._status = 0
        self._decoder = EventDecoder()
        self._counted_events = 0
        self._saw_done = False
        self._error_body = bytearray()

    def begin(self, status: int) -> None:
        """Record the status of the response."""
        self._status = status

    def receive(self, data: bytes, now: float) -> None:
        """Parse a piece of the body that arrived at ``now``."""
        if self._status != 200:
            self._error_body += data[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        try:
            for event in self._decoder.feed(data):
                if event == DONE:
                    self._saw_done = True
                else:
                    self._process_event(_decode(event), now)
        except (msgspec.DecodeError, SkiffError) as error:
            self.fail("malformed event", str(error))

    def _process_event(self, event: _Event, now: float) -> None:
        if event.error is not None:
            self.fail("error event", event.error.message)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self._count_token(now)

    def _count_token(self, now: float) -> None:
        self._counted_events += 1
        if self._counted_events == 1:
            self.first_at = now
        else:
            self.itls.append(now - self.last_at)
        self.last_at = now

    def end(self, now: float) -> None:
        """Record the end of the body."""
        self.ended_at = now
        if self._status != 200:
            self.fail(f"http {self._status}", self._error_body.decode(errors="replace"))
        elif not self._saw_done:
            self.fail("no [DONE]", "the stream ended before its last event")
        self._settle()

    def _settle(self) -> None:
        if self.output_tokens == 0:  # without usage in the stream: one event, one token
            self.output_tokens = self._counted_events
        if self._counted_events == 0:
            self.first_at = self.last_at = self.ended_at
        if self._expected_tokens is not None and self.output_tokens != self._expected_tokens:
            self.fail("wrong length", f"{self.output_tokens} tokens instead of {self._expected_tokens}")
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, kind: str, detail: str = "") -> None:
        """Record a failure, unless one is recorded already."""
        if self.failure == OK:
            self.failure, self.detail = kind, detail
        if not self.done.done():
            self.done.set_result(None)
