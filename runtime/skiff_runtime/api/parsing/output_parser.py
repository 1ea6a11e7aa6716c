"""The output parser of a chat choice, and the plan that selects it together with the grammar of the output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, MakeOutputParser, ReasoningDelta
from skiff_runtime.api.parsing.mistral import JSON_LIST
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.parsing.reasoning_parser import ReasoningParser
from skiff_runtime.api.parsing.structured_outputs import (
    allow_reasoning_before,
    constrain_tool_calls,
    tool_schema,
)
from skiff_runtime.api.parsing.tool_parser import ContentParser, ToolCallFormat, ToolCallOptions, ToolParser
from skiff_runtime.api.schemas.request_bodies import FunctionTool, NamedToolChoice, ToolFields
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import ChatPrompt, Grammar


class ChatOutputParser:
    """An ``OutputParser`` of at least one of two parts: reasoning first, then tool calls or plain content."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, includes_reasoning: bool = True
    ) -> None:
        """Without ``includes_reasoning``, the reasoning is dropped."""
        self._reasoning = reasoning
        self._tools = tools
        self._includes_reasoning = includes_reasoning

    def push(self, text: str) -> list[Delta]:
        return self._parse_rest([text] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        deltas = [] if self._reasoning is None else self._parse_rest(self._reasoning.finish())
        return deltas if self._tools is None else [*deltas, *self._tools.finish()]

    def _parse_rest(self, parts: Sequence[ReasoningDelta | str]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if isinstance(part, ReasoningDelta):
                if self._includes_reasoning:
                    deltas.append(part)
            elif self._tools is None:
                deltas.append(ContentDelta(part))
            else:
                deltas += self._tools.push(part)
        return deltas


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The grammar and the parser of a chat request's output.

    ``make_parser`` is None where all text is content. ``keeps_special_tokens``: the detokenizer must not leave special
    tokens out, because the parser looks for them.
    """

    grammar: Grammar | None
    make_parser: MakeOutputParser | None
    keeps_special_tokens: bool


def plan_output(
    body: ToolFields,
    prompt: ChatPrompt,
    grammar: Grammar | None,
    output_format: OutputFormat,
    *,
    includes_reasoning: bool = True,
) -> OutputPlan:
    """Plan the output of a chat request; ``grammar`` is the constraint on an output without calls.

    Without ``includes_reasoning``, the response leaves the model's reasoning out. Raises ``InvalidRequest``.
    """
    tools = body.offered_tools
    special_tokens = output_format.special_tokens
    tool_call_format = _select_format(body, tools, output_format) if tools else None
    if tool_call_format is not None:
        grammar = constrain_tool_calls(body, tools, tool_call_format, grammar, special_tokens)
    start = output_format.reasoning_start(prompt)
    if grammar is not None and start is not None:
        grammar = allow_reasoning_before(grammar, start, output_format.reasoning_format, special_tokens)
    if tool_call_format is None and start is None:
        return OutputPlan(grammar, None, keeps_special_tokens=False)
    markers = set(() if tool_call_format is None else tool_call_format.markers)
    make_reasoning_parser = None
    if start is not None:
        markers.update(output_format.reasoning_format.markers)
        make_reasoning_parser = partial(ReasoningParser, start, output_format.reasoning_format)
    keeps_special_tokens = not special_tokens.isdisjoint(markers)
    if tool_call_format is None and not keeps_special_tokens:
        make_parser = _make_parser_of(make_reasoning_parser, None, includes_reasoning)
        return OutputPlan(grammar, make_parser, keeps_special_tokens)
    dropped = tuple(sorted(special_tokens - markers))
    if tool_call_format is None:
        # Special tokens that are kept for the markers of the reasoning are dropped from the content here.
        make_content_parser = partial(ContentParser, ToolCallOptions(frozenset(), special_tokens=dropped))
        make_parser = _make_parser_of(make_reasoning_parser, make_content_parser, includes_reasoning)
        return OutputPlan(grammar, make_parser, keeps_special_tokens)
    is_single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedToolChoice)
    options = ToolCallOptions(
        names=frozenset(tool.function.name for tool in tools),
        max_calls=1 if is_single else None,
        special_tokens=dropped,
        schemas={tool.function.name: tool.function.parameters or {} for tool in tools},
        is_enforced=body.requires_call,
    )
    make_tool_parser = partial(tool_call_format.parser, options)
    make_parser = _make_parser_of(make_reasoning_parser, make_tool_parser, includes_reasoning)
    return OutputPlan(grammar, make_parser, keeps_special_tokens)


def _select_format(
    body: ToolFields, tools: Sequence[FunctionTool], output_format: OutputFormat
) -> ToolCallFormat:
    """Return the model's format; where a call is enforced that the format cannot enforce, a plain JSON list."""
    if output_format.tool_call_format is None:
        raise InvalidRequest(
            "the model's chat template supports no tools in a known format; remove 'tools', or name the format with "
            "--tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    own = output_format.tool_call_format
    if not body.requires_call:
        return own
    schemas = [tool_schema(tool) for tool in tools]
    can_be_enforced = own.can_be_enforced(output_format.special_tokens) and own.can_express(schemas)
    return own if can_be_enforced else JSON_LIST


def _make_parser_of(
    make_reasoning_parser: Callable[[], ReasoningParser] | None,
    make_tool_parser: Callable[[], ToolParser] | None,
    includes_reasoning: bool,
) -> MakeOutputParser | None:
    if make_reasoning_parser is None and make_tool_parser is None:
        return None

    def make_parser() -> ChatOutputParser:
        return ChatOutputParser(
            None if make_reasoning_parser is None else make_reasoning_parser(),
            None if make_tool_parser is None else make_tool_parser(),
            includes_reasoning=includes_reasoning,
        )

    return make_parser
