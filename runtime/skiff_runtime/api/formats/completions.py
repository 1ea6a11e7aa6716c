"""How completions and their chunks are written; a chunk of a stream has the shape of the whole."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skiff_runtime.api.formats.chunks import Chunks, make_response_head
from skiff_runtime.api.formats.logprobs import CompletionLogprobs, joined
from skiff_runtime.api.formats.request_spec import FINISH_REASONS, Answer, ServedModel
from skiff_runtime.api.schemas.request_bodies import StreamOptions
from skiff_runtime.api.sse import encode_json
from skiff_runtime.api.usage import format_usage
from skiff_runtime.messages import FinishReason, StreamOpened, TextLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Echo:
    """That answers begin with their prompts. ``texts``: of each prompt, None for one of token ids.

    What ids write is told by the log-probabilities of their tokens. ``alone``: no answer follows; the one token
    that is computed nevertheless goes unseen.
    """

    texts: Sequence[str | None]
    alone: bool


class CompletionResponseFormatter:
    """Writes one reply. ``logprobs``: each token's are told, with ``echo`` also of the prompt's tokens."""

    def __init__(
        self,
        model: ServedModel,
        options: StreamOptions | None,
        *,
        choices: int = 1,
        copies: int = 1,
        logprobs: bool = False,
        echo: Echo | None = None,
    ) -> None:
        self._head = make_response_head(
            "cmpl", "text_completion", model=model.name, fingerprint=model.fingerprint
        )
        self.id: str = self._head["id"]
        self.chunks = Chunks(self._head, options, choices=choices, copies=copies)
        self.logprobs = logprobs
        self._copies = copies
        self._echo = echo

    def choice(self, index: int) -> "CompletionChoice | EchoChoiceFormatter":
        if self._echo is None:
            return CompletionChoice(self, index)
        text = self._echo.texts[index // self._copies]
        return EchoChoiceFormatter(self, index, text, alone=self._echo.alone)

    def open(self, index: int, opened: StreamOpened) -> None:
        self.chunks.open(index, opened)

    def ending(self, usage: Usage) -> bytes:
        return self.chunks.ending(self._shown(usage))

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json({**self._head, "choices": choices, "usage": format_usage(self._shown(usage))})

    def _shown(self, usage: Usage) -> Usage:
        """Without tokens that go unseen."""
        alone = self._echo is not None and self._echo.alone
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens) if alone else usage


class CompletionChoice:
    """Writes one choice. Text alone costs an ``EventTemplate`` an increment."""

    __slots__ = ("_chunks", "_frame", "_index", "_logprobs")

    def __init__(self, reply: CompletionResponseFormatter, index: int, prompt: str | None = "") -> None:
        """``prompt``: as in ``CompletionLogprobs``."""
        self._chunks = reply.chunks
        self._index = index
        self._logprobs = CompletionLogprobs(prompt) if reply.logprobs else None
        self._frame = None
        if not reply.logprobs and not reply.chunks.continuous:
            self._frame = reply.chunks.frame(self._choice)

    def opening(self) -> bytes:
        return b""

    def prompt(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._frame is not None:
            return self._frame.fill(text) if text else b""
        self._chunks.count(self._index, token)
        told = self._told(() if logprobs is None else [logprobs])
        return self._chunks.event(self._choice(text, logprobs=told)) if text or told else b""

    def closing(self, finish: FinishReason) -> bytes:
        return self._chunks.event(self._choice("", finish=finish))

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self._choice(answer.text, logprobs=self._told(answer.logprobs), finish=answer.finish)

    def _told(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any] | None:
        return self._logprobs.format_output(tokens) if self._logprobs is not None and tokens else None

    def _choice(
        self,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish: FinishReason = FinishReason.RUNNING,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS.get(finish),
        }


class EchoChoiceFormatter(CompletionChoice):
    """Writes a choice that begins with its prompt."""

    __slots__ = ("_alone", "_answering", "_decoder", "_length", "_text")

    def __init__(
        self, reply: CompletionResponseFormatter, index: int, text: str | None, *, alone: bool
    ) -> None:
        super().__init__(reply, index, text)
        self._text = text
        self._alone = alone
        self._length = 0
        self._answering = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def opening(self) -> bytes:
        """The prompt, unless its tokens bring it."""
        if self._logprobs is not None or not self._text:
            return b""
        return self._chunks.event(self._choice(self._text))

    def prompt(self, tokens: list[TextLogprobs]) -> bytes:
        if self._logprobs is None and self._text is not None:
            return b""
        text = self._echoed(tokens)
        self._length += len(text)
        told = None if self._logprobs is None else self._logprobs.of_prompt(tokens)
        return self._chunks.event(self._choice(text, logprobs=told)) if text or told else b""

    def delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._alone:
            return b""
        if self._logprobs is not None and not self._answering:
            self._answering = True
            self._logprobs.begin_output(self._length)
        return super().delta(text, token, logprobs)

    def closing(self, finish: FinishReason) -> bytes:
        return super().closing(FinishReason.LENGTH if self._alone else finish)

    def whole(self, answer: Answer) -> dict[str, Any]:
        prompt = self._text if self._text is not None else self._echoed(answer.prompt)
        text, tokens, finish = answer.text, answer.logprobs, answer.finish
        if self._alone:
            text, tokens, finish = "", [], FinishReason.LENGTH
        told = None
        if self._logprobs is not None:
            before = self._logprobs.of_prompt(answer.prompt)
            self._logprobs.begin_output(len(prompt))
            told = joined([before, self._logprobs.format_output(tokens)])
        return self._choice(prompt + text, logprobs=told, finish=finish)

    def _echoed(self, tokens: Sequence[TextLogprobs]) -> str:
        """What to show of the prompt beside the log-probabilities of its next tokens."""
        if self._text is None:
            return self._decoder.decode(b"".join(each.chosen.data for each in tokens))
        return "" if self._length else self._text
