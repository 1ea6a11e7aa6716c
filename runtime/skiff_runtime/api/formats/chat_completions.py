"""How chat completions and their chunks are written."""

from collections.abc import Sequence
from typing import Any

from skiff_runtime.api.formats.chunks import Chunks, make_response_head
from skiff_runtime.api.formats.logprobs import format_chat_logprobs
from skiff_runtime.api.formats.request_spec import FINISH_REASONS, Answer, ServedModel
from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, Parsing, ReasoningDelta, ToolCallDelta
from skiff_runtime.api.schemas.request_bodies import StreamOptions
from skiff_runtime.api.sse import encode_json
from skiff_runtime.api.usage import format_usage
from skiff_runtime.messages import FinishReason, StreamOpened, TextLogprobs, Usage


class ChatResponseFormatter:
    """Writes one reply. ``parsing`` None: what the model writes is content, and nothing else."""

    def __init__(
        self,
        model: ServedModel,
        options: StreamOptions | None,
        *,
        choices: int = 1,
        parsing: Parsing | None = None,
    ) -> None:
        self._head = make_response_head(
            "chatcmpl", "chat.completion", model=model.name, fingerprint=model.fingerprint
        )
        self.id: str = self._head["id"]
        chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self.chunks = Chunks(chunk_head, options, choices=choices, copies=choices)
        self.parsing = parsing

    def choice(self, index: int) -> "ChatChoice":
        return ChatChoice(self, index)

    def open(self, index: int, opened: StreamOpened) -> None:
        self.chunks.open(index, opened)

    def ending(self, usage: Usage) -> bytes:
        return self.chunks.ending(usage)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json({**self._head, "choices": choices, "usage": format_usage(usage)})


class ChatChoice:
    """Writes one choice. Text that needs no parsing costs an ``EventTemplate`` an increment."""

    __slots__ = ("_called", "_chunks", "_frame", "_index", "_parser")

    def __init__(self, reply: ChatResponseFormatter, index: int) -> None:
        self._chunks = chunks = reply.chunks
        self._index = index
        self._parser = None if reply.parsing is None else reply.parsing()
        self._called = False
        self._frame = None
        if self._parser is None and not chunks.continuous:
            self._frame = chunks.frame(lambda hole: self._choice({"content": hole}))

    def opening(self) -> bytes:
        return self._chunks.event(self._choice({"role": "assistant", "content": ""}))

    def prompt(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._frame is None or logprobs is not None:
            self._chunks.count(self._index, token)
            return self._events(self._parsed(text), logprobs)
        return self._frame.fill(text) if text else b""

    def closing(self, finish: FinishReason) -> bytes:
        rest = b"" if self._parser is None else self._events(self._parser.finish(), None)
        return rest + self._chunks.event(self._choice({}, finish=self._reason(finish)))

    def whole(self, answer: Answer) -> dict[str, Any]:
        deltas = self._parsed(answer.text)
        if self._parser is not None:
            deltas = [*deltas, *self._parser.finish()]
        self._note_calls(deltas)
        return {
            "index": self._index,
            "message": _message(deltas, parsed=self._parser is not None),
            "logprobs": format_chat_logprobs(answer.logprobs) if answer.logprobs else None,
            "finish_reason": self._reason(answer.finish),
        }

    def _parsed(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        return [ContentDelta(text)] if self._parser is None else self._parser.push(text)

    def _events(self, deltas: Sequence[Delta], logprobs: TextLogprobs | None) -> bytes:
        """An event for each delta, the first of which tells ``logprobs``, if need be one without a delta."""
        self._note_calls(deltas)
        fields = [_fields(delta) for delta in deltas]
        told = None if logprobs is None else format_chat_logprobs([logprobs])
        if told is not None and not fields:
            fields.append({})
        choices = [self._choice(each, logprobs=None if n else told) for n, each in enumerate(fields)]
        return b"".join(map(self._chunks.event, choices))

    def _note_calls(self, deltas: Sequence[Delta]) -> None:
        self._called = self._called or any(isinstance(delta, ToolCallDelta) for delta in deltas)

    def _reason(self, finish: FinishReason) -> str:
        called = self._called and finish is FinishReason.STOP
        return "tool_calls" if called else FINISH_REASONS[finish]

    def _choice(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _fields(delta: Delta) -> dict[str, Any]:
    """The ``delta`` object of a chunk."""
    match delta:
        case ContentDelta():
            return {"content": delta.text}
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
    function = {"arguments": delta.arguments}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": function}]}
    call = {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, **function},
    }
    return {"tool_calls": [call]}


def _message(deltas: Sequence[Delta], *, parsed: bool) -> dict[str, Any]:
    """The ``message`` object of a whole reply."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not parsed:
        return message
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls = _calls([delta for delta in deltas if isinstance(delta, ToolCallDelta)])
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return {**message, "reasoning_content": reasoning or None}


def _calls(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """The whole calls, in order of their numbers, of the pieces in order of their coming."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(
            piece.index,
            {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}},
        )
        call["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
