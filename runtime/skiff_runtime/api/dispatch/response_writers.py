"""Where the rows of a request go: a stream of events, or one JSON body at the end, of one choice or several.

Nothing is written before the first row, so a request that fails earlier gets a real 4xx or 5xx status.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from skiff_runtime.api.error_replies import error_body, error_headers
from skiff_runtime.api.formats.chunks import sum_usage
from skiff_runtime.api.formats.request_spec import (
    ChoiceFormatter,
    ChoiceOutput,
    RequestSpec,
    ResponseFormatter,
)
from skiff_runtime.api.http.asgi import MAX_BACKLOG_BYTES, AsgiWriter, Headers
from skiff_runtime.errors import RequestError
from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    RequestFailed,
    StreamOpened,
    TextLogprobs,
    Usage,
)


class Sink(Protocol):
    """Takes the rows of one choice, in order; exactly one of ``finish`` and ``fail`` is the last."""

    def open(self, opened: StreamOpened) -> None:
        """The choice is being computed."""
        ...

    def prompt(self, tokens: list[TextLogprobs]) -> None:
        """Log-probabilities of the prompt's next tokens."""
        ...

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        """One increment."""
        ...

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        """The last row."""
        ...

    def fail(self, error: RequestFailed) -> None:
        """The request ended with an error."""
        ...


def make_choice_writers(generation: RequestSpec, writer: AsgiWriter, headers: Headers) -> Sequence[Sink]:
    """A sink for each choice of a request, all of which write into one response."""
    writer.raise_backlog_limit((generation.num_choices - 1) * MAX_BACKLOG_BYTES)
    response = _Response(generation, writer, headers)
    kind = StreamingChoiceWriter if generation.stream else JsonChoiceWriter
    return [
        kind(response, generation.formatter.make_choice_formatter(index), index)
        for index in range(generation.num_choices)
    ]


class _Response:
    """What the choices of one request share. ``ended``: the last byte was written."""

    __slots__ = ("_copies", "_left", "_usages", "ended", "headers", "reply", "started", "wholes", "writer")

    def __init__(self, generation: RequestSpec, writer: AsgiWriter, headers: Headers) -> None:
        self.writer = writer
        self.headers = headers
        self.reply: ResponseFormatter = generation.formatter
        self.started = False
        self.ended = False
        self.wholes: list[dict[str, Any]] = [{}] * generation.num_choices
        self._copies = generation.copies
        self._left = generation.num_choices
        self._usages = [Usage(0, 0, 0)] * generation.num_choices

    def start(self) -> None:
        """Begin a stream, unless it has begun."""
        if not self.started:
            self.started = True
            kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            self.writer.start(200, [*kind, *self.headers])

    def close(self, index: int, usage: Usage) -> Usage | None:
        """One choice has ended; the usage of all, once all have."""
        self._usages[index] = usage
        self._left -= 1
        if self._left:
            return None
        self.ended = True
        return sum_usage(self._usages, self._copies)

    def fail(self, error: RequestFailed) -> None:
        """End with an error, whatever the other choices do."""
        if self.ended:
            return
        self.ended = True
        if self.started:
            self.writer.body(b"data: " + error_body(error) + b"\n\n", more=False)
        else:
            write_error(self.writer, error, self.headers)


class StreamingChoiceWriter:
    """Server-sent events, each written when its row arrives."""

    __slots__ = ("_choice", "_index", "_opened", "_response", "_writer")

    def __init__(self, response: _Response, choice: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._writer = response.writer
        self._choice = choice
        self._index = index
        self._opened = False

    def open(self, opened: StreamOpened) -> None:
        self._response.reply.start_choice(self._index, opened)

    def prompt(self, tokens: list[TextLogprobs]) -> None:
        data = self._choice.format_prompt_logprobs(tokens)
        if data:
            self._writer.raise_backlog_limit(len(data))
            self._writer.body(self._opening() + data, more=True)

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        data = self._choice.format_delta(text, token, logprobs)
        if not self._opened:
            data = self._opening() + data
        if data:
            self._writer.body(data, more=True)

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        data = self._choice.format_delta(text, token, logprobs)
        data = self._opening() + data + self._choice.format_closing(finish)
        total = self._response.close(self._index, usage)
        if total is not None:
            data += self._response.reply.format_ending(total)
        self._writer.body(data, more=total is None)

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)

    def _opening(self) -> bytes:
        """What goes before the first event of this choice, once."""
        if self._opened:
            return b""
        self._opened = True
        self._response.start()
        return self._choice.format_opening()


class JsonChoiceWriter:
    """Collects one choice; the JSON body is written when the last choice has ended."""

    __slots__ = ("_choice", "_index", "_logprobs", "_prompt", "_response", "_texts", "_tokens")

    def __init__(self, response: _Response, choice: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._choice = choice
        self._index = index
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TextLogprobs] = []
        self._prompt: list[TextLogprobs] = []

    def open(self, opened: StreamOpened) -> None:
        pass

    def prompt(self, tokens: list[TextLogprobs]) -> None:
        self._prompt += tokens

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        self._texts.append(text)
        if token != NO_TOKEN:
            self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        self.write(text, token, logprobs)
        response = self._response
        answer = ChoiceOutput("".join(self._texts), self._tokens, self._logprobs, self._prompt, finish)
        response.wholes[self._index] = self._choice.format_full(answer)
        total = response.close(self._index, usage)
        if total is not None:
            body = response.reply.format_full(response.wholes, total)
            write_json(response.writer, 200, body, response.headers)

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)


class NullChoiceWriter:
    """For a request that nobody listens to any more; its end is still awaited."""

    def open(self, opened: StreamOpened) -> None:
        pass

    def prompt(self, tokens: list[TextLogprobs]) -> None:
        pass

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        pass

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        pass

    def fail(self, error: RequestFailed) -> None:
        pass


def write_json(writer: AsgiWriter, status: int, body: bytes, headers: Headers) -> None:
    """A whole response with a JSON body."""
    length = str(len(body)).encode()
    writer.start(status, [(b"content-type", b"application/json"), (b"content-length", length), *headers])
    writer.body(body, more=False)


def write_error(writer: AsgiWriter, error: RequestError | RequestFailed, headers: Headers) -> None:
    """A whole response with an error body."""
    write_json(writer, error.status, error_body(error), [*headers, *error_headers(error)])
