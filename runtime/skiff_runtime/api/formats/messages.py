"""POST /v1/messages in Anthropic's shape: from a request body to a ``RequestSpec``, and the formatters of its response.

The conversation is translated into the chat template's messages, and the output is planned and parsed as the chat
endpoint's. The response is a message of content blocks: thinking, text and tool calls, in the order in which the model
writes them.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from skiff_runtime.api.formats.request_spec import ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel, make_text_options
from skiff_runtime.api.http.anthropic_errors import anthropic_error, anthropic_error_body
from skiff_runtime.api.parsing.deltas import (
    ContentDelta,
    Delta,
    MakeOutputParser,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
)
from skiff_runtime.api.parsing.output_format import OutputFormat, effort_hints
from skiff_runtime.api.parsing.output_parser import plan_output
from skiff_runtime.api.schemas.json_object import parse_object
from skiff_runtime.api.schemas.messages_request import (
    MessageParam,
    MessagesPromptFields,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ToolResultBlock,
    ToolUseBlock,
    join_texts,
)
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.grammar.spec import json_schema_grammar
from skiff_runtime.messages import (
    ChatPrompt,
    FinishReason,
    RequestFailed,
    StreamOpened,
    TextLogprobs,
    Usage,
)
from skiff_runtime.sse import EventTemplate, encode_event, encode_json

SIGNATURE: Final = "unsigned"
"""The ``signature`` of thinking blocks. It signs nothing, and is not empty because clients drop blocks without one."""
BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Beginning of a system block that Claude Code addresses to Anthropic's servers, not to the model. Its value differs from
one conversation to the next, so that no cached prefix would be found after it."""
_CALL_ID_PREFIX: Final = "call_"


def prepare_messages(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``."""
    body = parse_body(MessagesRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    prompt = build_messages_prompt(body, model.output_format)
    schema = body.output_schema
    grammar = None if schema is None else json_schema_grammar(schema, "output_config.format")
    plan = plan_output(body.tool_fields(), prompt, grammar, model.output_format)
    sampling = body.sampling_fields()
    text = make_text_options(sampling)
    return RequestSpec(
        prompts=[prompt],
        sampling=replace(model.make_sampling_spec(sampling), fits_context=True),
        text=replace(text, skip_special_tokens=False) if plan.keeps_special_tokens else text,
        formatter=MessageResponseFormatter(
            model,
            max_tokens=body.max_tokens,
            make_parser=plan.make_parser,
            shows_thinking=getattr(body.thinking, "display", None) != "omitted",
        ),
        stream=bool(body.stream),
        priority=body.priority or 0,
        grammar=plan.grammar,
        user=None if body.metadata is None else body.metadata.user_id,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
    )


def build_messages_prompt(body: MessagesPromptFields, output_format: OutputFormat) -> ChatPrompt:
    """Return the input of the chat template for ``body``."""
    options = dict(body.chat_template_kwargs or {})
    effort = _effort_of(body)
    if (
        effort is None
        and body.thinking is not None
        and (switch := output_format.reasoning_switch()) is not None
    ):
        options.setdefault(switch, True)
    return ChatPrompt(
        _Conversation.render(body),
        add_generation_prompt=not body.continues_final_message,
        continue_final_message=body.continues_final_message,
        tools=[tool.to_template() for tool in body.tool_fields().offered_tools] or None,
        template_options=options,
        template_hints={} if effort is None else effort_hints(effort),
    )


def _effort_of(body: MessagesPromptFields) -> str | None:
    """Return the effort of the reasoning in the words of the other endpoints."""
    if isinstance(body.thinking, ThinkingDisabled):
        return "none"
    return None if body.output_config is None else body.output_config.effort


class _Conversation:
    """The messages of a chat template, from the turns of a request.

    Consecutive turns of one role are combined. The system's turns before the first other one belong to the system
    prompt. A later one is rendered in the user's role at its place, because many templates accept a system message only
    at the beginning, and because the cached prefix before it stays valid.

    Texts are joined at the end, so that the time is linear in their length, however many blocks they come in.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        """Messages whose content, and reasoning, are still lists of texts."""

    @classmethod
    def render(cls, body: MessagesPromptFields) -> list[dict[str, Any]]:
        """Return the conversation of a request as chat templates expect it."""
        conversation = cls()
        texts = [block.text for block in body.system or () if not block.text.startswith(BILLING_HEADER)]
        for turn in body.messages:
            if turn.role == "system" and not conversation._messages:
                texts += _texts_of(turn)
            elif turn.role == "assistant":
                conversation._add_assistant(turn)
            else:
                conversation._add_user(turn)
        system = join_texts(texts)
        head = [{"role": "system", "content": system}] if system else []
        return [*head, *map(_join_message, conversation._messages)]

    def _add_user(self, turn: MessageParam) -> None:
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                self._messages.append(block.to_template())
            elif isinstance(block, TextBlock):
                self._last("user")["content"].append(block.text)

    def _add_assistant(self, turn: MessageParam) -> None:
        message = self._last("assistant")
        for block in turn.content:
            match block:
                case TextBlock():
                    message["content"].append(block.text)
                case ThinkingBlock() if block.thinking:
                    message.setdefault("reasoning_content", []).append(block.thinking)
                case ToolUseBlock():
                    message.setdefault("tool_calls", []).append(block.to_template())
                case RedactedThinkingBlock() | ThinkingBlock() | ToolResultBlock():
                    pass

    def _last(self, role: str) -> dict[str, Any]:
        """Return the last message, or a new one if the last is of another role."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def _join_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its texts joined: a user's as paragraphs, an assistant's as they were generated."""
    if message["role"] == "tool":
        return message
    join = join_texts if message["role"] == "user" else "".join
    joined = {**message, "content": join(message["content"])}
    if "reasoning_content" in message:
        joined["reasoning_content"] = "".join(message["reasoning_content"])
    return joined


def _texts_of(turn: MessageParam) -> list[str]:
    return [block.text for block in turn.content if isinstance(block, TextBlock)]


class MessageResponseFormatter:
    """Writes one response. Without ``make_parser``, all text is one text block.

    ``max_tokens``: the limit that the client set, which the context may have lowered.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        max_tokens: int,
        make_parser: MakeOutputParser | None = None,
        shows_thinking: bool = True,
    ) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self.shows_thinking = shows_thinking
        self.make_parser = make_parser
        self._model = model.name
        self._max_tokens = max_tokens
        self._opened = Usage(0, 0, 0)
        self._choice = MessageChoiceFormatter(self)

    def make_choice_formatter(self, index: int) -> "MessageChoiceFormatter":
        return self._choice

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        self._opened = Usage(opened.prompt_tokens, 0, opened.cached_tokens)

    def format_start(self) -> bytes:
        """Return the first event of a stream."""
        message = self._message([], self._opened, {"stop_reason": None, "stop_sequence": None})
        return encode_event({"type": "message_start", "message": message}, "message_start")

    def format_ending(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(usage), "usage": _format_usage(usage)}
        return encode_event(delta, "message_delta") + encode_event({"type": "message_stop"}, "message_stop")

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json(self._message(choices[0]["content"], usage, self._stop(usage)))

    def format_error(self, error: RequestFailed, request_id: str) -> bytes:
        return anthropic_error_body(error, request_id)

    def format_error_event(self, error: RequestFailed, request_id: str) -> bytes:
        return encode_event(anthropic_error(error, request_id), "error")

    def _message(
        self, content: list[dict[str, Any]], usage: Usage, stop: dict[str, str | None]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": _format_usage(usage),
        }

    def _stop(self, usage: Usage) -> dict[str, str | None]:
        """Return the reason for the end of the message, and the stop sequence that ended it."""
        return {"stop_reason": self._stop_reason(usage), "stop_sequence": usage.stop_string}

    def _stop_reason(self, usage: Usage) -> str:
        match self._choice.finish_reason:
            case FinishReason.STOP if usage.stop_string is not None:
                return "stop_sequence"
            case FinishReason.STOP:
                return "tool_use" if self._choice.has_tool_calls else "end_turn"
            case FinishReason.LENGTH if usage.completion_tokens < self._max_tokens:
                return "model_context_window_exceeded"
        # Anthropic's API has no other word for an answer that was cut short, by its deadline or by POST /abort.
        return "max_tokens"


class MessageChoiceFormatter:
    """Writes the content blocks of a message. An increment costs no more than filling the block's ``EventTemplate``."""

    __slots__ = ("_block", "_index", "_parser", "_response", "_template", "finish_reason", "has_tool_calls")

    def __init__(self, response: MessageResponseFormatter) -> None:
        self._response = response
        self._parser: OutputParser | None = None if response.make_parser is None else response.make_parser()
        self._index = -1
        self._block: tuple[str, int] | None = None
        """Type of the open block, and for a tool call its index among the calls."""
        self._template: EventTemplate | None = None
        self.finish_reason = FinishReason.RUNNING
        self.has_tool_calls = False

    def format_opening(self) -> bytes:
        return self._response.format_start()

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if not text:
            return b""
        if self._parser is not None:
            return self._format_events(self._parser.push(text))
        if self._template is None:
            return self._format_event(ContentDelta(text))
        return self._template.fill(text)

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        rest = b"" if self._parser is None else self._format_events(self._parser.finish())
        self.finish_reason = finish_reason
        return rest + self._close_block()

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        self.finish_reason = output.finish_reason
        if self._parser is None:
            deltas: Sequence[Delta] = [ContentDelta(output.text)] if output.text else ()
        else:
            deltas = [*self._parser.push(output.text), *self._parser.finish()]
        blocks: list[dict[str, Any]] = []
        last: tuple[str, int] | None = None
        for delta in deltas:
            kind = _block_of(delta)
            if kind != last:
                last = kind
                blocks.append(self._make_block(delta))
            self._extend_block(blocks[-1], delta)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _input_json(block["input"])
            elif block["type"] == "thinking":
                block["signature"] = SIGNATURE
        return {"content": blocks}

    def _format_events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(map(self._format_event, deltas))

    def _format_event(self, delta: Delta) -> bytes:
        """Return the events of one delta: those that open its block, unless it is open, and its increment."""
        opening = b"" if _block_of(delta) == self._block else self._open_block(delta)
        text = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if not text or self._template is None:
            return opening
        return opening + self._template.fill(text)

    def _open_block(self, delta: Delta) -> bytes:
        closing = self._close_block()
        self._index += 1
        self._block = _block_of(delta)
        block = self._make_block(delta)
        if isinstance(delta, ToolCallDelta):
            block["input"] = {}
        is_hidden = isinstance(delta, ReasoningDelta) and not self._response.shows_thinking
        self._template = None if is_hidden else self._make_template(delta)
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closing + encode_event(start, "content_block_start")

    def _make_template(self, delta: Delta) -> EventTemplate:
        placeholder = f"<{self._response.id}>"
        match delta:
            case ContentDelta():
                increment = {"type": "text_delta", "text": placeholder}
            case ReasoningDelta():
                increment = {"type": "thinking_delta", "thinking": placeholder}
            case ToolCallDelta():
                increment = {"type": "input_json_delta", "partial_json": placeholder}
        return EventTemplate(self._block_delta(increment), placeholder, "content_block_delta")

    def _close_block(self) -> bytes:
        if self._block is None:
            return b""
        signature = b""
        if self._block[0] == "thinking":
            increment = {"type": "signature_delta", "signature": SIGNATURE}
            signature = encode_event(self._block_delta(increment), "content_block_delta")
        self._block = self._template = None
        stop = {"type": "content_block_stop", "index": self._index}
        return signature + encode_event(stop, "content_block_stop")

    def _block_delta(self, increment: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": increment}

    def _make_block(self, delta: Delta) -> dict[str, Any]:
        """Return the block that begins with ``delta``, without its content. The input of a call is JSON as text."""
        match delta:
            case ContentDelta():
                return {"type": "text", "text": ""}
            case ReasoningDelta():
                return {"type": "thinking", "thinking": "", "signature": ""}
        self.has_tool_calls = True
        return {"type": "tool_use", "id": _tool_use_id(delta.id or ""), "name": delta.name, "input": ""}

    def _extend_block(self, block: dict[str, Any], delta: Delta) -> None:
        match delta:
            case ContentDelta():
                block["text"] += delta.text
            case ReasoningDelta():
                if self._response.shows_thinking:
                    block["thinking"] += delta.text
            case ToolCallDelta():
                block["input"] += delta.arguments


def _block_of(delta: Delta) -> tuple[str, int]:
    """Identify the block that a delta belongs to, among consecutive ones."""
    match delta:
        case ContentDelta():
            return "text", 0
        case ReasoningDelta():
            return "thinking", 0
    return "tool_use", delta.index


def _tool_use_id(call_id: str) -> str:
    """Return a call's id as Anthropic's API writes them. The ids of formats that prescribe their shape stay as they are."""
    rest = call_id.removeprefix(_CALL_ID_PREFIX)
    return call_id if rest == call_id else f"toolu_{rest}"


def _input_json(arguments: str) -> msgspec.Raw:
    """Return the arguments as they are; an empty object if ``max_tokens`` cut them short.

    They are not encoded again, because objects at the limit of nesting can be decoded alone but not within a message.
    """
    return msgspec.Raw(b"{}" if parse_object(arguments) is None else arguments.encode())


def _format_usage(usage: Usage) -> dict[str, int]:
    """Return the ``usage`` object. As in Anthropic's API, cached tokens are no part of ``input_tokens``.

    Every prompt is cached without marks, so that no token counts as the creation of a cache entry.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
