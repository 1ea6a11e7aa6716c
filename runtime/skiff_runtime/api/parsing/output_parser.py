"""What a chat request means for its answer: tools in the prompt, the grammar of the text, and the parser that reads it."""

from dataclasses import dataclass
from typing import Any

from skiff_runtime.api.parsing import reasoning_parser as reasoning
from skiff_runtime.api.parsing.answer import ChatOutputParser
from skiff_runtime.api.parsing.deltas import Parsing
from skiff_runtime.api.parsing.dialects import LIST, Tool, ToolCallFormat
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.parsing.reasoning_parser import ReasoningParser, ReasoningStart
from skiff_runtime.api.parsing.tool_parser import Tools
from skiff_runtime.api.tool_schemas import FunctionTool, NamedToolChoice, ToolFields
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import structural_tag_grammar, to_structural_tag
from skiff_runtime.messages import ChatPrompt, Grammar

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """``parsing`` None: all text is content. ``keeps_special_tokens``: the parser needs to see special tokens."""

    grammar: Grammar | None
    parsing: Parsing | None
    keeps_special_tokens: bool


def offered_tools(body: ToolFields) -> list[FunctionTool]:
    """The tools that this answer may call."""
    return [] if body.tool_choice == "none" else list(body.tools or ())


def plan_output(
    body: ToolFields, prompt: ChatPrompt, grammar: Grammar | None, formats: OutputFormat
) -> OutputPlan:
    """``grammar``: what an answer without calls must match. Raises ``InvalidRequest``."""
    offered = offered_tools(body)
    dialect = _dialect(body, formats) if offered else None
    if dialect is not None:
        grammar = _with_calls(body, offered, dialect, grammar, formats)
    thinking = formats.thinking(prompt)
    if grammar is not None and thinking is not None:
        grammar = allow_reasoning_before(grammar, thinking)
    keeps_special_tokens = dialect is not None and not formats.special.isdisjoint(dialect.marks)
    return OutputPlan(grammar, _parsing(body, offered, dialect, thinking, formats), keeps_special_tokens)


def _dialect(body: ToolFields, formats: OutputFormat) -> ToolCallFormat:
    """The model's format; where a call must be made and its marks are special tokens, a list that needs none."""
    if formats.dialect is None:
        raise InvalidRequest(
            "the model's chat template knows no tools in a format that is understood; remove 'tools', or name the "
            "format with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    enforced = body.tool_choice not in (None, "auto")
    return LIST if enforced and not formats.dialect.is_text(formats.special) else formats.dialect


def _parsing(
    body: ToolFields,
    offered: list[FunctionTool],
    dialect: ToolCallFormat | None,
    thinking: ReasoningStart | None,
    formats: OutputFormat,
) -> Parsing | None:
    if dialect is None and thinking is None:
        return None
    single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedToolChoice)
    special = () if dialect is None else tuple(sorted(formats.special - set(dialect.marks)))
    tools = Tools(frozenset(tool.function.name for tool in offered), 1 if single else None, special)

    def parser() -> ChatOutputParser:
        return ChatOutputParser(
            None if thinking is None else ReasoningParser(thinking),
            None if dialect is None else dialect.parser(tools),
        )

    return parser


def _with_calls(
    body: ToolFields,
    offered: list[FunctionTool],
    dialect: ToolCallFormat,
    grammar: Grammar | None,
    formats: OutputFormat,
) -> Grammar | None:
    """The grammar of an answer that calls, may call, or need not call."""
    tools = [_tool(tool) for tool in offered]
    several = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in tools if tool.name == choice.function.name]
        return structural_tag_grammar(dialect.calls(named, several=False), "tools")
    if choice == "required":
        return structural_tag_grammar(dialect.calls(tools, several=several), "tools")
    if grammar is None and not any(tool.function.strict for tool in offered):
        return None
    if not dialect.is_text(formats.special):
        raise InvalidRequest(
            f"this model writes calls in the format {dialect.name}, with special tokens that no grammar can ask for: "
            'so \'strict\' tools, or tools beside a format of the answer, need "tool_choice": "required" or "none"',
            param="tools",
        )
    if grammar is not None:
        forms = [to_structural_tag(grammar), dialect.calls(tools, several=several)]
        return structural_tag_grammar({"type": "or", "elements": forms}, "tools")
    within = dialect.triggered_calls_format(tools)
    if within is None:
        raise InvalidRequest(
            f"this model writes calls in the format {dialect.name}, which text does not announce: so 'strict' tools "
            'need "tool_choice": "required"',
            param="tools",
        )
    return structural_tag_grammar(within, "tools")


def _tool(tool: FunctionTool) -> Tool:
    schema = tool.function.parameters
    if schema is None:
        return Tool(tool.function.name, _NO_ARGUMENTS)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"the parameters of {tool.function.name!r} must be of type object", param="tools"
        )
    return Tool(tool.function.name, {**schema, "type": "object"})


def allow_reasoning_before(grammar: Grammar, thinking: ReasoningStart) -> Grammar:
    """The grammar of the whole text, where ``grammar`` is that of the answer behind the reasoning."""
    if thinking is ReasoningStart.CLOSED:
        return grammar
    begin = "" if thinking is ReasoningStart.OPENED else reasoning.OPEN
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.CLOSE}
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    head: dict[str, Any] = {"type": "sequence", "elements": [thought, gap]}
    if thinking is ReasoningStart.FREE:
        head = {"type": "optional", "content": head}
    return structural_tag_grammar(
        {"type": "sequence", "elements": [head, to_structural_tag(grammar)]}, "response_format"
    )
