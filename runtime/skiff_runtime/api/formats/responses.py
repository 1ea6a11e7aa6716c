"""POST /v1/responses: from a request body to a ``RequestSpec``, and the formatter of its response.

A response has one choice. It is built row by row also where it is not streamed (``RequestSpec.is_incremental``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from skiff_runtime.api.formats.logprobs import format_chat_logprobs
from skiff_runtime.api.formats.openai_errors import OpenAIErrorFormatter
from skiff_runtime.api.formats.request_spec import ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.response_items import (
    Item,
    build_messages,
    make_id,
    normalize_input,
    without_logprobs,
)
from skiff_runtime.api.formats.response_output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    EventWriter,
    OutputBuilder,
)
from skiff_runtime.api.formats.response_store import ResponseStore, StoredResponse
from skiff_runtime.api.formats.response_tools import OfferedTool, ToolSet
from skiff_runtime.api.formats.served_model import ServedModel, make_prompt_options, make_text_options
from skiff_runtime.api.http.auth import Principal
from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, MakeOutputParser, OutputParser
from skiff_runtime.api.parsing.output_format import effort_hints
from skiff_runtime.api.parsing.output_parser import plan_output
from skiff_runtime.api.parsing.structured_outputs import check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import JsonObjectFormat, StrictModel
from skiff_runtime.api.schemas.responses_request import ResponsesJsonSchemaFormat, ResponsesRequest
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.errors import InvalidRequest, QueueFull
from skiff_runtime.grammar.spec import json_object_grammar, json_schema_grammar
from skiff_runtime.messages import (
    NO_TOKEN,
    ChatPrompt,
    FinishReason,
    Grammar,
    RequestFailed,
    SamplingSpec,
    StreamOpened,
    TextLogprobs,
    Usage,
)
from skiff_runtime.sse import encode_json

_CUT_SHORT: Final = (FinishReason.LENGTH, FinishReason.TIMEOUT)


def prepare_response(
    raw: bytes, model: ServedModel, principal: Principal, *, store: ResponseStore
) -> RequestSpec:
    """Validate a request body, which may continue a response of the same principal in ``store``.

    Raises ``RequestError``. Without a limit, the output may fill the context.
    """
    key = principal.key
    body = parse_body(ResponsesRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    parent = None
    if body.previous_response_id is not None:
        parent = store.get(body.previous_response_id, key, param="previous_response_id")
    items = normalize_input(body.input, lambda item_ids: store.load_items(item_ids, key))
    messages = build_messages(
        body.instructions, items if parent is None else [*parent.load_conversation(), *items]
    )
    if not messages:
        raise InvalidRequest("'input' has no message; send a string or a list of items", param="input")
    tools = ToolSet.from_body(body)
    prompt = ChatPrompt(
        messages,
        tools=[tool.to_template() for tool in tools.fields.offered_tools] or None,
        template_options=body.chat_template_kwargs or {},
        template_hints=_template_hints(body),
    )
    plan = plan_output(tools.fields, prompt, _text_grammar(body), model.output_format)
    check_grammar_conflicts(body, plan.grammar)
    sampling = model.make_sampling_spec(body, logprobs=body.num_logprobs)
    text = make_text_options(body)
    response_id = make_id("resp")

    def keep(response: bytes, output: Sequence[Item]) -> None:
        """Store the response, unless the request declines that."""
        if body.store is not False:
            output_items = {item["id"]: encode_json(without_logprobs(item)) for item in output}
            store.add(StoredResponse(response_id, key, response, encode_json(items), parent, output_items))

    return RequestSpec(
        prompts=[prompt],
        sampling=sampling,
        text=replace(text, skip_special_tokens=False) if plan.keeps_special_tokens else text,
        formatter=ResponseFormatter(
            describe_request(body, response_id, sampling, tools),
            is_streaming=bool(body.stream),
            make_parser=plan.make_parser,
            tools=tools.by_name,
            on_end=keep,
        ),
        stream=bool(body.stream),
        is_incremental=True,
        priority=body.priority or 0,
        grammar=plan.grammar,
        user=body.user or body.safety_identifier,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        prompt_options=make_prompt_options(body),
    )


def _text_grammar(body: ResponsesRequest) -> Grammar | None:
    text_format = body.text.format if body.text is not None else None
    if isinstance(text_format, ResponsesJsonSchemaFormat):
        return json_schema_grammar(text_format.json_schema, "text.format.schema")
    return json_object_grammar() if isinstance(text_format, JsonObjectFormat) else None


def _template_hints(body: ResponsesRequest) -> dict[str, Any]:
    """Return what the chat template may know of the reasoning's effort and the text's verbosity."""
    effort = None if body.reasoning is None else body.reasoning.effort
    hints = {} if effort is None else effort_hints(effort)
    if body.text is not None and body.text.verbosity is not None:
        hints["verbosity"] = body.text.verbosity
    return hints


def describe_request(
    body: ResponsesRequest, response_id: str, sampling: SamplingSpec, tools: ToolSet
) -> Item:
    """Return the fields of the response that are known from its request."""
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice or "auto"
    text_format: Any = {"type": "text"}
    if text is not None and text.format is not None:
        text_format = text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": IN_PROGRESS,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": text_format, "verbosity": None if text is None else text.verbosity},
        "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, StrictModel) else choice,
        "tools": tools.echoed,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


@dataclass(frozen=True, slots=True)
class _Ending:
    """Fields of the response that say how its output ended."""

    status: str
    incomplete_details: dict[str, Any] | None

    @classmethod
    def of(cls, finish: FinishReason) -> "_Ending":
        if finish is FinishReason.STOP:
            return cls(COMPLETED, None)
        # An abort has no reason in OpenAI's API.
        return cls(INCOMPLETE, {"reason": "max_output_tokens" if finish in _CUT_SHORT else None})


class ResponseFormatter(OpenAIErrorFormatter):
    """Writes one response, as events or whole. Without ``make_parser``, all text is that of a message."""

    def __init__(
        self,
        head: Item,
        *,
        is_streaming: bool,
        make_parser: MakeOutputParser | None,
        tools: dict[str, OfferedTool],
        on_end: Callable[[bytes, Sequence[Item]], None],
    ) -> None:
        """``head``: the response as it is before its output. ``on_end`` gets the response that has ended as JSON."""
        self.id: str = head["id"]
        self._head = head
        self._on_end = on_end
        self._events = EventWriter(is_streaming=is_streaming)
        self._output = OutputBuilder(self._events, tools)
        self._choice = OutputFormatter(self, None if make_parser is None else make_parser())
        self._ending = _Ending(IN_PROGRESS, None)

    def make_choice_formatter(self, index: int) -> "OutputFormatter":
        return self._choice

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        pass

    @property
    def output(self) -> OutputBuilder:
        """The output so far."""
        return self._output

    def format_opening(self) -> bytes:
        """Return the events before the output."""
        response = encode_json(self._head)
        created = self._events.write_response("response.created", response)
        return created + self._events.write_response("response.in_progress", response)

    def end_output(self, finish: FinishReason) -> bytes:
        """Record how the output ended, and return the events of its end."""
        self._ending = _Ending.of(finish)
        return self._output.finish(self._ending.status)

    def format_ending(self, usage: Usage) -> bytes:
        return self._events.write_response(f"response.{self._ending.status}", self._format(usage))

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return self._format(usage)

    def format_error_event(self, error: RequestFailed, request_id: str) -> bytes:
        closing = self._output.finish(INCOMPLETE)
        fields = {
            "status": "failed",
            "error": {"code": _error_code(error.status), "message": error.message},
            "output": self._output.items,
        }
        failed = encode_json({**self._head, **fields})
        return closing + self._events.write_response("response.failed", failed)

    def _format(self, usage: Usage) -> bytes:
        """Return the response that has ended, which is stored."""
        is_complete = self._ending.status == COMPLETED
        response = encode_json(
            {
                **self._head,
                "completed_at": int(time.time()) if is_complete else None,
                "status": self._ending.status,
                "incomplete_details": self._ending.incomplete_details,
                "output": self._output.items,
                "usage": _format_usage(usage, self._output.reasoning_tokens),
            }
        )
        self._on_end(response, self._output.items)
        return response


class OutputFormatter:
    """Writes the output of one response. Plain text costs no more than an event from a template."""

    __slots__ = ("_output", "_parser", "_response")

    def __init__(self, response: ResponseFormatter, parser: OutputParser | None) -> None:
        self._response = response
        self._output = response.output
        self._parser = parser

    def format_opening(self) -> bytes:
        return self._response.format_opening()

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if self._parser is None and logprobs is None:
            return self._output.add_text(text) if text else b""
        formatted = [] if logprobs is None else format_chat_logprobs([logprobs])["content"]
        deltas = self._parse(text, is_token=logprobs is not None)
        return self._output.add(deltas, tokens=int(token != NO_TOKEN), logprobs=formatted)

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        rest = b""
        if self._parser is not None:
            rest = self._output.add(self._parser.finish(), tokens=0, logprobs=())
        return rest + self._response.end_output(finish_reason)

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        """Record the end of the output; the response itself has the items."""
        self.format_closing(output.finish_reason)
        return {}

    def _parse(self, text: str, *, is_token: bool) -> Sequence[Delta]:
        if self._parser is not None:
            return self._parser.push(text) if text else ()
        return [ContentDelta(text)] if text or is_token else ()


def _format_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(status: int) -> str:
    """Return the code of a response's error; OpenAI's API knows only a few."""
    if status == QueueFull.status:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < 500 else "server_error"
