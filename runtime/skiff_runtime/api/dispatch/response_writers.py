"""Response writers: each choice of a request writes its rows as server-sent events, or as one JSON body at the end.

Nothing is written before the first row, so a request that fails earlier gets a 4xx or 5xx status.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from skiff_runtime.api.formats.chunks import sum_usage
from skiff_runtime.api.formats.request_spec import (
    ChoiceFormatter,
    ChoiceOutput,
    RequestSpec,
    ResponseFormatter,
)
from skiff_runtime.api.http.asgi import MAX_BACKLOG_BYTES, AsgiWriter, Headers, TrailedSend
from skiff_runtime.api.http.responses import error_headers
from skiff_runtime.api.http.usage_header import USAGE_HEADER, TokenCounts, format_usage_header
from skiff_runtime.errors import CLIENT_CLOSED_REQUEST, RequestError
from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    RequestFailed,
    StreamOpened,
    TextLogprobs,
    Usage,
)

REQUEST_TIMEOUT: Final = 408


class ChoiceWriter(Protocol):
    """Writes the rows of one choice, in order. The last call is either ``finish`` or ``fail``."""

    def start(self, opened: StreamOpened) -> None:
        """Record that the engine has begun to compute the choice."""
        ...

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        """Write log-probabilities of the prompt's next tokens."""
        ...

    def write_vector(self, data: bytes) -> None:
        """Write the vector of a request with pooling, bytes of ``Wire.VECTOR``; ``finish`` follows."""
        ...

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        """Write one row; ``text`` may be "", ``token`` may be ``NO_TOKEN``."""
        ...

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> RequestFailed | None:
        """Write the last row. Returns the error that was written instead, if a part of the response would be no use."""
        ...

    def fail(self, error: RequestFailed) -> None:
        """End the whole response with an error."""
        ...


def make_choice_writers(
    spec: RequestSpec,
    writer: AsgiWriter,
    headers: Headers,
    *,
    request_id: str,
    trailed: TrailedSend | None = None,
) -> Sequence[ChoiceWriter]:
    """Return a writer for each choice of a request. All of them write into one response.

    ``trailed``: the ``send`` of ``writer``, for a request whose response reports its token counts by ``X-Skiff-Usage``.
    """
    writer.raise_backlog_limit((spec.num_choices - 1) * MAX_BACKLOG_BYTES)
    response = _Response(spec, writer, headers, request_id, trailed)
    kind: type[StreamingChoiceWriter | JsonChoiceWriter | IncrementalJsonChoiceWriter | VectorChoiceWriter]
    kind = JsonChoiceWriter
    if spec.pooling is not None:
        kind = VectorChoiceWriter
    elif spec.stream:
        kind = StreamingChoiceWriter
    elif spec.is_incremental:
        kind = IncrementalJsonChoiceWriter
    return [
        kind(response, spec.formatter.make_choice_formatter(index), index)
        for index in range(spec.num_choices)
    ]


class _Response:
    """The response that the choices of one request share."""

    __slots__ = (
        "_copies",
        "_ended",
        "_headers",
        "_num_running",
        "_outputs",
        "_request_id",
        "_started",
        "_trailed",
        "_usages",
        "formatter",
        "writer",
    )

    def __init__(
        self,
        spec: RequestSpec,
        writer: AsgiWriter,
        headers: Headers,
        request_id: str,
        trailed: TrailedSend | None,
    ) -> None:
        self.writer = writer
        self.formatter: ResponseFormatter = spec.formatter
        self._headers = headers
        self._request_id = request_id
        self._started = False
        self._ended = False  # its last byte was written
        self._outputs: list[dict[str, Any]] = [{}] * spec.num_choices
        self._copies = spec.copies
        self._num_running = spec.num_choices
        self._usages = [Usage(0, 0, 0)] * spec.num_choices
        self._trailed = trailed

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        """Record that the engine has begun to compute choice ``index``."""
        self._usages[index] = Usage(opened.prompt_tokens, 0, opened.cached_tokens)
        self.formatter.start_choice(index, opened)

    def start_stream(self) -> None:
        """Write the head of a stream; no-op if it is written already."""
        if not self._started:
            self._started = True
            stream_headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            if self._trailed is not None:
                stream_headers.append((b"trailer", USAGE_HEADER))
                stream_headers.append(
                    self._usage_header(sum_usage(self._usages, self._copies), is_final=False)
                )
            self.writer.start(200, [*stream_headers, *self._headers])

    def end_stream(self, data: bytes, usage: Usage) -> None:
        """Write the last events of the last choice, and those that end the response."""
        if self._trailed is not None:
            self._trailed.trailers = [self._usage_header(usage, is_final=True)]
        self.writer.body(data + self.formatter.format_ending(usage), more=False)

    def finish_choice(self, index: int, usage: Usage) -> Usage | None:
        """Record the end of choice ``index``. Returns the usage of the whole request once all choices have ended."""
        self._usages[index] = usage
        self._num_running -= 1
        if self._num_running:
            return None
        self._ended = True
        return sum_usage(self._usages, self._copies)

    def finish_json_choice(self, index: int, output: dict[str, Any], usage: Usage) -> None:
        """Record the output of choice ``index``; with the last one, write the response."""
        self._outputs[index] = output
        total = self.finish_choice(index, usage)
        if total is not None:
            headers = self._headers
            if self._trailed is not None:
                headers = [*headers, self._usage_header(total, is_final=True)]
            write_json(self.writer, 200, self.formatter.format_full(self._outputs, total), headers)

    def fail(self, error: RequestFailed) -> None:
        """End the response with an error, whatever state the other choices are in."""
        if self._ended:
            return
        self._ended = True
        if self._started:
            self.writer.body(self.formatter.format_error_event(error, self._request_id), more=False)
        else:
            body = self.formatter.format_error(error, self._request_id)
            write_error(self.writer, error, body, self._headers)

    def _usage_header(self, usage: Usage, *, is_final: bool) -> tuple[bytes, bytes]:
        counts = TokenCounts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return USAGE_HEADER, format_usage_header(counts, is_final=is_final)


class StreamingChoiceWriter:
    """Writes one choice as server-sent events, each when its row arrives."""

    __slots__ = ("_formatter", "_index", "_opened", "_response", "_writer")

    def __init__(self, response: _Response, formatter: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._writer = response.writer
        self._formatter = formatter
        self._index = index
        self._opened = False

    def start(self, opened: StreamOpened) -> None:
        self._response.start_choice(self._index, opened)

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        data = self._formatter.format_prompt_logprobs(tokens)
        if data:
            # They come from the prompt at once, faster than any client could read them.
            self._writer.raise_backlog_limit(len(data))
            self._writer.body(self._format_opening() + data, more=True)

    def write_vector(self, data: bytes) -> None:
        pass

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        if self._opened:
            data = self._formatter.format_delta(text, token, logprobs)
        else:
            data = self._format_opening() + self._formatter.format_delta(text, token, logprobs)
        if data:
            self._writer.body(data, more=True)

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        data = self._format_opening() + self._formatter.format_delta(text, token, logprobs)
        data += self._formatter.format_closing(finish)
        total = self._response.finish_choice(self._index, usage)
        if total is None:
            self._writer.body(data, more=True)
        else:
            self._response.end_stream(data, total)

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)

    def _format_opening(self) -> bytes:
        """Return the events before the first event of this choice; b"" after the first call."""
        if self._opened:
            return b""
        self._opened = True
        self._response.start_stream()
        return self._formatter.format_opening()


class JsonChoiceWriter:
    """Collects one choice. The JSON body is written when the last choice has ended."""

    __slots__ = ("_formatter", "_index", "_logprobs", "_prompt_logprobs", "_response", "_texts", "_tokens")

    def __init__(self, response: _Response, formatter: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._formatter = formatter
        self._index = index
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TextLogprobs] = []
        self._prompt_logprobs: list[TextLogprobs] = []

    def start(self, opened: StreamOpened) -> None:
        self._response.start_choice(self._index, opened)

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        self._prompt_logprobs += tokens

    def write_vector(self, data: bytes) -> None:
        pass

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
        output = ChoiceOutput(
            "".join(self._texts), self._tokens, self._logprobs, self._prompt_logprobs, finish
        )
        self._response.finish_json_choice(self._index, self._formatter.format_full(output), usage)

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)


class IncrementalJsonChoiceWriter:
    """Passes each row of one choice to its formatter, which collects them. The JSON body is written at the end."""

    __slots__ = ("_formatter", "_index", "_response")

    def __init__(self, response: _Response, formatter: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._formatter = formatter
        self._index = index

    def start(self, opened: StreamOpened) -> None:
        pass

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        pass

    def write_vector(self, data: bytes) -> None:
        pass

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        self._formatter.format_delta(text, token, logprobs)

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> None:
        self.write(text, token, logprobs)
        output = self._formatter.format_full(ChoiceOutput("", [], [], [], finish))
        self._response.finish_json_choice(self._index, output, usage)

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)


class VectorChoiceWriter:
    """Writes one choice whose result is a vector. A request that ends without it, at its deadline or by an abort, fails."""

    __slots__ = ("_formatter", "_index", "_response", "_vector")

    def __init__(self, response: _Response, formatter: ChoiceFormatter, index: int) -> None:
        self._response = response
        self._formatter = formatter
        self._index = index
        self._vector = b""

    def start(self, opened: StreamOpened) -> None:
        pass

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        pass

    def write_vector(self, data: bytes) -> None:
        self._vector = data

    def write(self, text: str, token: int, logprobs: TextLogprobs | None) -> None:
        pass

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
    ) -> RequestFailed | None:
        if not self._vector:
            error = _incomplete(finish)
            self._response.fail(error)
            return error
        output = ChoiceOutput("", [], [], [], finish, self._vector)
        self._response.finish_json_choice(self._index, self._formatter.format_full(output), usage)
        return None

    def fail(self, error: RequestFailed) -> None:
        self._response.fail(error)


def _incomplete(finish: FinishReason) -> RequestFailed:
    """Return the error of a request that ended before its vector was computed."""
    if finish is FinishReason.TIMEOUT:
        text = "the request's deadline passed before all vectors were computed; send fewer inputs, or allow more time"
        return RequestFailed(0, REQUEST_TIMEOUT, "timeout_error", text, "request_timeout")
    text = "the request was aborted before all vectors were computed"
    return RequestFailed(0, CLIENT_CLOSED_REQUEST, "invalid_request_error", text, "aborted")


class NullChoiceWriter:
    """Discards the output of a request whose client has disconnected, and whose end is still awaited."""

    def start(self, opened: StreamOpened) -> None:
        pass

    def write_prompt_logprobs(self, tokens: list[TextLogprobs]) -> None:
        pass

    def write_vector(self, data: bytes) -> None:
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
    """Write a whole response with a JSON body."""
    length = str(len(body)).encode()
    writer.start(status, [(b"content-type", b"application/json"), (b"content-length", length), *headers])
    writer.body(body, more=False)


def write_error(
    writer: AsgiWriter, error: RequestError | RequestFailed, body: bytes, headers: Headers
) -> None:
    """Write an error as a whole response, whose ``body`` has the endpoint's shape."""
    write_json(writer, error.status, body, [*headers, *error_headers(error)])
