"""POST /v1/chat/completions: from a request body to a ``RequestSpec``, and the formatters of its response."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from skiff_runtime.api.formats.chunks import ChunkWriter, decode_token_ids, format_usage, make_response_head
from skiff_runtime.api.formats.logprobs import format_chat_logprobs, format_prompt_logprobs
from skiff_runtime.api.formats.openai_errors import OpenAIErrorFormatter
from skiff_runtime.api.formats.request_spec import FINISH_REASONS, ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel, make_prompt_options, make_text_options
from skiff_runtime.api.parsing.deltas import (
    ContentDelta,
    Delta,
    MakeOutputParser,
    ReasoningDelta,
    ToolCallDelta,
)
from skiff_runtime.api.parsing.output_format import effort_hints
from skiff_runtime.api.parsing.output_parser import plan_output
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import ChatCompletionRequest, StreamOptions
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.messages import NO_TOKEN, ChatPrompt, FinishReason, StreamOpened, TextLogprobs, Usage
from skiff_runtime.sse import encode_json


def prepare_chat(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``. Without a limit, the output may fill the context."""
    body = parse_body(ChatCompletionRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    copies = body.n or 1
    prompt = build_chat_prompt(body)
    plan = plan_output(
        body,
        prompt,
        build_response_grammar(body),
        model.output_format,
        includes_reasoning=body.include_reasoning is not False,
    )
    check_grammar_conflicts(body, plan.grammar)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    text = make_text_options(body)
    return RequestSpec(
        prompts=[prompt],
        sampling=model.make_sampling_spec(body, logprobs=num_logprobs, prompt_logprobs=body.prompt_logprobs),
        text=replace(text, skip_special_tokens=False) if plan.keeps_special_tokens else text,
        formatter=ChatResponseFormatter(
            model,
            body.stream_options,
            choices=copies,
            make_parser=plan.make_parser,
            return_token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs,
        ),
        stream=bool(body.stream),
        copies=copies,
        priority=body.priority or 0,
        grammar=plan.grammar,
        user=body.end_user,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        prompt_options=make_prompt_options(body),
    )


def build_chat_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    """Return the input of the chat template for ``body``."""
    continues = bool(body.continue_final_message)
    hints = {} if body.reasoning_effort is None else effort_hints(body.reasoning_effort)
    if body.verbosity is not None:
        hints["verbosity"] = body.verbosity
    return ChatPrompt(
        [message.to_template() for message in body.messages],
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
        tools=[tool.to_template() for tool in body.offered_tools] or None,
        template_options=body.chat_template_kwargs or {},
        template_hints=hints,
    )


class ChatResponseFormatter(OpenAIErrorFormatter):
    """Writes one response. Without ``make_parser``, all text is content.

    With ``return_token_ids``, the response has ``prompt_token_ids``, and each choice or chunk the ``token_ids`` of its
    tokens, as in vLLM. ``prompt_logprobs`` is the number of top log-probabilities of the prompt's tokens, None for no
    log-probabilities. They stand beside the choices, which share the prompt.
    """

    def __init__(
        self,
        model: ServedModel,
        options: StreamOptions | None,
        *,
        choices: int = 1,
        make_parser: MakeOutputParser | None = None,
        return_token_ids: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._head = make_response_head(
            "chatcmpl", "chat.completion", model=model.name, fingerprint=model.fingerprint
        )
        self.id: str = self._head["id"]
        chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self.chunks = ChunkWriter(chunk_head, options, choices=choices, copies=choices)
        self.make_parser = make_parser
        self.return_token_ids = return_token_ids
        self.prompt_fields: dict[str, Any] = {}
        self._prompt_top = prompt_logprobs
        self._prompt_logprobs: list[dict[str, Any] | None] = []

    def make_choice_formatter(self, index: int) -> "ChatChoiceFormatter":
        return ChatChoiceFormatter(self, index)

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        self.chunks.start_choice(index, opened)
        if self.return_token_ids:
            self.prompt_fields = {"prompt_token_ids": decode_token_ids(opened.prompt_token_ids)}

    def format_ending(self, usage: Usage) -> bytes:
        return self.chunks.format_ending(usage)

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        body = {**self._head, "choices": choices, "usage": format_usage(usage), **self.prompt_fields}
        return encode_json(
            body if self._prompt_top is None else {**body, "prompt_logprobs": self._prompt_logprobs}
        )

    def note_prompt_logprobs(self, tokens: Sequence[TextLogprobs]) -> None:
        """Keep the log-probabilities of the prompt, which come with each choice, and are the same."""
        if self._prompt_top is not None and not self._prompt_logprobs:
            self._prompt_logprobs = format_prompt_logprobs(tokens, self._prompt_top)


class ChatChoiceFormatter:
    """Writes one choice. Text that needs no parsing costs no more than filling an ``EventTemplate``."""

    __slots__ = (
        "_chunks",
        "_has_tool_calls",
        "_index",
        "_parser",
        "_response",
        "_template",
        "_token_ids",
    )

    def __init__(self, response: ChatResponseFormatter, index: int) -> None:
        self._response = response
        self._chunks = chunks = response.chunks
        self._index = index
        self._token_ids: list[int] | None = [] if response.return_token_ids else None
        """The tokens since the last event, for the next one."""
        self._parser = None if response.make_parser is None else response.make_parser()
        self._has_tool_calls = False
        self._template = None
        if self._parser is None and not chunks.continuous_usage and self._token_ids is None:
            self._template = chunks.make_template(lambda placeholder: self._choice({"content": placeholder}))

    def format_opening(self) -> bytes:
        opening = self._choice({"role": "assistant", "content": ""})
        return self._chunks.format_event(opening, **self._response.prompt_fields)

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._template is None or logprobs is not None:
            self._chunks.count(self._index, token)
            if self._token_ids is not None and token != NO_TOKEN:
                self._token_ids.append(token)
            return self._format_events(self._parse(text), logprobs)
        return self._template.fill(text) if text else b""

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        rest = b"" if self._parser is None else self._format_events(self._parser.finish(), None)
        closing = self._choice({}, finish_reason=self._finish_reason(finish_reason))
        return rest + self._chunks.format_event(closing | self._take_token_ids())

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        deltas = self._parse(output.text)
        if self._parser is not None:
            deltas = [*deltas, *self._parser.finish()]
        self._note_tool_calls(deltas)
        self._response.note_prompt_logprobs(output.prompt_logprobs)
        choice = {
            "index": self._index,
            "message": _format_message(deltas, is_parsed=self._parser is not None),
            "logprobs": format_chat_logprobs(output.logprobs) if output.logprobs else None,
            "finish_reason": self._finish_reason(output.finish_reason),
        }
        return choice if self._token_ids is None else {**choice, "token_ids": output.token_ids}

    def _parse(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        return [ContentDelta(text)] if self._parser is None else self._parser.push(text)

    def _format_events(self, deltas: Sequence[Delta], logprobs: TextLogprobs | None) -> bytes:
        """Write an event for each delta. The first one contains ``logprobs``, even where there is no delta."""
        self._note_tool_calls(deltas)
        fields = [_format_delta(delta) for delta in deltas]
        formatted = None if logprobs is None else format_chat_logprobs([logprobs])
        if formatted is not None and not fields:
            fields.append({})
        choices = [
            self._choice(each, logprobs=None if number else formatted) for number, each in enumerate(fields)
        ]
        if choices:
            choices[0] |= self._take_token_ids()
        return b"".join(map(self._chunks.format_event, choices))

    def _take_token_ids(self) -> dict[str, list[int]]:
        """Return the field with the tokens since the last event, if the request wants it."""
        if self._token_ids is None:
            return {}
        token_ids, self._token_ids = self._token_ids, []
        return {"token_ids": token_ids}

    def _note_tool_calls(self, deltas: Sequence[Delta]) -> None:
        self._has_tool_calls = self._has_tool_calls or any(
            isinstance(delta, ToolCallDelta) for delta in deltas
        )

    def _finish_reason(self, finish_reason: FinishReason) -> str:
        # A call that was cut short has "length" or "abort", so that a client does not run it.
        if self._has_tool_calls and finish_reason is FinishReason.STOP:
            return "tool_calls"
        return FINISH_REASONS[finish_reason]

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _format_delta(delta: Delta) -> dict[str, Any]:
    """Return the ``delta`` object of a chunk."""
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


def _format_message(deltas: Sequence[Delta], *, is_parsed: bool) -> dict[str, Any]:
    """Return the ``message`` object of a response that is not streamed."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not is_parsed:
        return message
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls = _join_tool_calls([delta for delta in deltas if isinstance(delta, ToolCallDelta)])
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return {**message, "reasoning_content": reasoning or None}


def _join_tool_calls(parts: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Join the parts of tool calls into complete calls, in the order of their indices."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(
            part.index,
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}},
        )
        call["function"]["arguments"] += part.arguments
    return [calls[index] for index in sorted(calls)]
