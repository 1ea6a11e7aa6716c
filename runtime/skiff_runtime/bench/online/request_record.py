"""One streamed answer as the client saw it: when each part came, and how it ended."""

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


class Exchange:
    """A request under way, then its record. Times are seconds of one monotonic clock.

    ``failure`` is ``OK`` for an answer that came whole, else a kind: "http 429", "timeout", ….
    ``wanted_tokens``: how many tokens the answer must have, or None where the model may stop by itself.
    """

    def __init__(self, due_at: float, wanted_tokens: int | None) -> None:
        self.due_at = due_at
        self.sent_at = due_at
        self.first_at = 0.0
        self.last_at = 0.0
        self.ended_at = 0.0
        self.gaps: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.failure = OK
        self.detail = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted = wanted_tokens
        self._status = 0
        self._decoder = EventDecoder()
        self._counted_events = 0
        self._whole = False
        self._error_body = bytearray()

    def begin(self, status: int) -> None:
        """The head of the answer has come."""
        self._status = status

    def take(self, piece: bytes, now: float) -> None:
        """A piece of the answer's body has come."""
        if self._status != 200:
            self._error_body += piece[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        try:
            for data in self._decoder.feed(piece):
                if data == DONE:
                    self._whole = True
                else:
                    self._take_event(_decode(data), now)
        except (msgspec.DecodeError, SkiffError) as error:
            self.fail("malformed event", str(error))

    def _take_event(self, event: _Event, now: float) -> None:
        if event.error is not None:
            self.fail("error event", event.error.message)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self._note_text(now)

    def _note_text(self, now: float) -> None:
        self._counted_events += 1
        if self._counted_events == 1:
            self.first_at = now
        else:
            self.gaps.append(now - self.last_at)
        self.last_at = now

    def end(self, now: float) -> None:
        """The body is complete."""
        self.ended_at = now
        if self._status != 200:
            self.fail(f"http {self._status}", self._error_body.decode(errors="replace"))
        elif not self._whole:
            self.fail("no [DONE]", "the stream ended before its last event")
        self._settle()

    def _settle(self) -> None:
        if self.output_tokens == 0:  # a server that tells no usage: one event, one token
            self.output_tokens = self._counted_events
        if self._counted_events == 0:
            self.first_at = self.last_at = self.ended_at
        if self._wanted is not None and self.output_tokens != self._wanted:
            self.fail("wrong length", f"{self.output_tokens} tokens instead of {self._wanted}")
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, kind: str, detail: str = "") -> None:
        """The request has failed; the first reason stands."""
        if self.failure == OK:
            self.failure, self.detail = kind, detail
        if not self.done.done():
            self.done.set_result(None)
