"""POST /v1/completions: from a request body to a ``RequestSpec``, and the formatters of its response.

A chunk of a stream has the same shape as the complete response.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skiff_runtime.api.formats.chunks import ChunkWriter, decode_token_ids, format_usage, make_response_head
from skiff_runtime.api.formats.logprobs import (
    CompletionLogprobs,
    concatenate,
    format_prompt_logprobs,
    keep_top,
)
from skiff_runtime.api.formats.openai_errors import OpenAIErrorFormatter
from skiff_runtime.api.formats.request_spec import FINISH_REASONS, ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel, make_prompt_options, make_text_options
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import CompletionRequest, StreamOptions
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.messages import NO_TOKEN, FinishReason, StreamOpened, TextLogprobs, Usage
from skiff_runtime.sse import encode_json


def prepare_completion(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``."""
    body = parse_body(CompletionRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    copies = body.n or 1
    grammar = build_response_grammar(body)
    check_grammar_conflicts(body, grammar)
    return RequestSpec(
        prompts=body.prompt,
        sampling=model.make_sampling_spec(
            body, logprobs=body.logprobs, prompt_logprobs=_num_prompt_logprobs(body)
        ),
        text=make_text_options(body),
        formatter=CompletionResponseFormatter(
            model,
            body.stream_options,
            choices=copies * len(body.prompt),
            copies=copies,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            echo=_echo(body),
            return_token_ids=bool(body.return_token_ids),
        ),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=grammar,
        user=body.end_user,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        prompt_options=make_prompt_options(body),
    )


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return the number of top log-probabilities to compute for each token of the prompt; None for no log-probabilities.

    The echo of a prompt of token ids needs them even where ``logprobs`` is unset: they carry the tokens' texts.
    """
    has_token_ids = any(isinstance(prompt, list) for prompt in body.prompt)
    wanted = [body.prompt_logprobs]
    if body.echo:
        wanted += [body.logprobs, 0 if has_token_ids else None]
    return max((each for each in wanted if each is not None), default=None)


def _echo(body: CompletionRequest) -> "Echo | None":
    if not body.echo:
        return None
    texts = [prompt if isinstance(prompt, str) else None for prompt in body.prompt]
    return Echo(texts, prompt_only=body.max_tokens == 0)


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts that the choices begin with.

    ``texts`` has an entry for each prompt: its text, or None for a prompt of token ids, whose text comes with the
    log-probabilities of its tokens. ``prompt_only``: no output follows; the engine computes one token all the same, and
    it is not shown.
    """

    texts: Sequence[str | None]
    prompt_only: bool


class CompletionResponseFormatter(OpenAIErrorFormatter):
    """Writes one response.

    ``logprobs`` is the number of top log-probabilities of its tokens, with ``echo`` also of the prompt's; None for no
    log-probabilities. ``prompt_logprobs`` is that of the prompt's tokens in vLLM's field of this name.
    """

    def __init__(
        self,
        model: ServedModel,
        options: StreamOptions | None,
        *,
        choices: int = 1,
        copies: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        echo: Echo | None = None,
        return_token_ids: bool = False,
    ) -> None:
        self._head = make_response_head(
            "cmpl", "text_completion", model=model.name, fingerprint=model.fingerprint
        )
        self.id: str = self._head["id"]
        self.chunks = ChunkWriter(self._head, options, choices=choices, copies=copies)
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self._copies = copies
        self._echo = echo
        self.prompt_token_ids: list[list[int]] | None = [[]] * choices if return_token_ids else None
        """Of each choice, with ``return_token_ids``."""

    def make_choice_formatter(self, index: int) -> "CompletionChoiceFormatter":
        if self._echo is None:
            return CompletionChoiceFormatter(self, index)
        text = self._echo.texts[index // self._copies]
        return EchoChoiceFormatter(self, index, text, prompt_only=self._echo.prompt_only)

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        self.chunks.start_choice(index, opened)
        if self.prompt_token_ids is not None:
            self.prompt_token_ids[index] = decode_token_ids(opened.prompt_token_ids)

    def format_ending(self, usage: Usage) -> bytes:
        return self.chunks.format_ending(self._shown_usage(usage))

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json(
            {**self._head, "choices": choices, "usage": format_usage(self._shown_usage(usage))}
        )

    def _shown_usage(self, usage: Usage) -> Usage:
        """Leave out the output tokens where the response shows the prompt alone."""
        prompt_only = self._echo is not None and self._echo.prompt_only
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens) if prompt_only else usage


class CompletionChoiceFormatter:
    """Writes one choice. Text without log-probabilities costs no more than filling an ``EventTemplate``."""

    __slots__ = (
        "_chunks",
        "_index",
        "_logprobs",
        "_prompt_token_ids",
        "_prompt_top",
        "_template",
        "_token_ids",
    )

    def __init__(self, response: CompletionResponseFormatter, index: int, prompt: str | None = "") -> None:
        """``prompt``: as in ``CompletionLogprobs``."""
        self._chunks = response.chunks
        self._index = index
        self._logprobs = None if response.logprobs is None else CompletionLogprobs(prompt)
        self._prompt_top = response.prompt_logprobs
        self._prompt_token_ids = response.prompt_token_ids
        self._token_ids: list[int] | None = None if response.prompt_token_ids is None else []
        """The tokens since the last event, for the next one."""
        self._template = None
        has_extras = response.logprobs is not None or self._token_ids is not None
        if not (has_extras or response.chunks.continuous_usage):
            self._template = response.chunks.make_template(self._choice)

    def format_opening(self) -> bytes:
        return b""

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._template is not None:
            return self._template.fill(text) if text else b""
        self._chunks.count(self._index, token)
        if self._token_ids is not None and token != NO_TOKEN:
            self._token_ids.append(token)
        formatted = self._format_logprobs(() if logprobs is None else [logprobs])
        if not (text or formatted):
            return b""
        return self._chunks.format_event(self._choice(text, logprobs=formatted) | self._take_token_ids())

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        closing = self._choice("", finish_reason=finish_reason)
        return self._chunks.format_event(closing | self._take_token_ids())

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = self._format_logprobs(output.logprobs)
        choice = self._choice(output.text, logprobs=logprobs, finish_reason=output.finish_reason)
        return choice | self._all_token_ids(output.token_ids) | self._format_prompt(output)

    def _format_prompt(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return the field of the prompt's log-probabilities, if the request has asked for it."""
        if self._prompt_top is None:
            return {}
        return {"prompt_logprobs": format_prompt_logprobs(output.prompt_logprobs, self._prompt_top)}

    def _take_token_ids(self) -> dict[str, list[int]]:
        """Return the field with the tokens since the last event, and with the first one also the prompt's."""
        if self._token_ids is None:
            return {}
        token_ids, self._token_ids = self._token_ids, []
        return self._all_token_ids(token_ids)

    def _all_token_ids(self, token_ids: list[int]) -> dict[str, list[int]]:
        """Return the fields with these tokens of the output and, the first time, with those of the prompt."""
        if self._token_ids is None:
            return {}
        fields = {"token_ids": token_ids}
        if self._prompt_token_ids is not None:
            fields["prompt_token_ids"] = self._prompt_token_ids[self._index]
            self._prompt_token_ids = None
        return fields

    def _format_logprobs(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any] | None:
        return self._logprobs.format_output(tokens) if self._logprobs is not None and tokens else None

    def _choice(
        self,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: FinishReason = FinishReason.RUNNING,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS.get(finish_reason),
        }


class EchoChoiceFormatter(CompletionChoiceFormatter):
    """Writes a choice that begins with its prompt."""

    __slots__ = ("_decoder", "_echo_top", "_has_output", "_prompt_length", "_prompt_only", "_text")

    def __init__(
        self, response: CompletionResponseFormatter, index: int, text: str | None, *, prompt_only: bool
    ) -> None:
        super().__init__(response, index, text)
        self._text = text
        self._prompt_only = prompt_only
        self._echo_top = response.logprobs or 0
        self._prompt_length = 0
        self._has_output = False
        # The bytes of one character may be spread over several tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def format_opening(self) -> bytes:
        """Return the prompt, unless it comes with the log-probabilities of its tokens."""
        if self._logprobs is not None or not self._text:
            return b""
        return self._chunks.format_event(self._choice(self._text))

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        if self._logprobs is None and self._text is not None:
            return b""
        text = self._echoed_text(tokens)
        self._prompt_length += len(text)
        logprobs = None if self._logprobs is None else self._logprobs.format_prompt(tokens)
        if not (text or logprobs):
            return b""
        return self._chunks.format_event(self._choice(text, logprobs=logprobs))

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._prompt_only:
            return b""
        if self._logprobs is not None and not self._has_output:
            self._has_output = True
            self._logprobs.begin_output(self._prompt_length)
        return super().format_delta(text, token, logprobs)

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        return super().format_closing(FinishReason.LENGTH if self._prompt_only else finish_reason)

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        prompt = self._text if self._text is not None else self._echoed_text(output.prompt_logprobs)
        text, tokens, finish_reason = output.text, output.logprobs, output.finish_reason
        if self._prompt_only:
            text, tokens, finish_reason = "", [], FinishReason.LENGTH
        logprobs = None
        if self._logprobs is not None:
            of_prompt = self._logprobs.format_prompt(keep_top(output.prompt_logprobs, self._echo_top))
            self._logprobs.begin_output(len(prompt))
            logprobs = concatenate([of_prompt, self._logprobs.format_output(tokens)])
        choice = self._choice(prompt + text, logprobs=logprobs, finish_reason=finish_reason)
        token_ids = self._all_token_ids([] if self._prompt_only else output.token_ids)
        return choice | token_ids | self._format_prompt(output)

    def _echoed_text(self, tokens: Sequence[TextLogprobs]) -> str:
        """Return the part of the prompt to show with the log-probabilities of its next tokens.

        A prompt that came as text is shown whole with the first of them.
        """
        if self._text is None:
            return self._decoder.decode(b"".join(each.chosen.data for each in tokens))
        return "" if self._prompt_length else self._text
