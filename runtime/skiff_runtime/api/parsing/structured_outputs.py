"""Structured outputs: from the fields of a request to the grammar that its output must match.

A chat request combines up to three constraints: the output format, the tool calls, and the reasoning before both.
"""

from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from skiff_runtime.api.parsing.reasoning_parser import ReasoningFormat, ReasoningStart
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolSchema
from skiff_runtime.api.schemas.request_bodies import (
    FunctionTool,
    JsonSchemaFormat,
    NamedToolChoice,
    SamplingFields,
    StructuralTagFormat,
    StructuredOutputFields,
    StructuredOutputs,
    ToolFields,
)
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import (
    check_structural_tag,
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
    to_structural_tag,
)
from skiff_runtime.messages import Grammar

_NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": False}


def build_response_grammar(body: StructuredOutputFields) -> Grammar | None:
    """Return the grammar that the request's output format demands, None for any text. Raises ``InvalidRequest``."""
    constraints = body.constraints()
    if len(constraints) > 1:
        first, second, *_ = constraints
        raise InvalidRequest(
            f"'{first}' and '{second}' both constrain the output; send only one", param=second
        )
    for param, value in constraints.items():
        if isinstance(value, StructuredOutputs):
            [(kind, part)] = value.constraints().items()
            return _build_grammar(kind, part, param)
        return _build_grammar(param, value, param)
    return None


def _build_grammar(kind: str, value: Any, param: str) -> Grammar:
    """Return the grammar of a constraint: its ``kind`` names a field, ``param`` the field in which it was sent."""
    match kind:
        case "guided_json":
            return json_schema_grammar(value, param)
        case "guided_regex" | "regex":
            return regex_grammar(value, param)
        case "guided_choice":
            return choice_grammar(value, param)
        case "guided_grammar" | "ebnf":
            return ebnf_grammar(value, param)
        case "structural_tag":
            return _build_structural_tag(value, param)
    match value:
        case JsonSchemaFormat():
            return json_schema_grammar(value.json_schema.json_schema, param)
        case StructuralTagFormat():
            return _build_structural_tag(value, param)
    return json_object_grammar()


def _build_structural_tag(value: StructuralTagFormat | str, param: str) -> Grammar:
    """Return the grammar of a structural tag, which may be JSON written as text, as vLLM and SGLang have it."""
    if isinstance(value, str):
        try:
            value = StructuralTagFormat.model_validate_json(value)
        except ValidationError as error:
            reason = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise InvalidRequest(f"'{param}' is not a structural tag: {reason}", param=param) from None
    if value.format is not None:
        check_structural_tag(value.format, param)
        return structural_tag_grammar(value.format, param)
    tags = [
        {
            "type": "tag",
            "begin": each.begin,
            "content": {"type": "json_schema", "json_schema": each.json_schema},
            "end": each.end,
        }
        for each in value.structures or ()
    ]
    return structural_tag_grammar({"type": "triggered_tags", "triggers": value.triggers, "tags": tags}, param)


def check_grammar_conflicts(body: SamplingFields, grammar: Grammar | None) -> None:
    """Raise ``InvalidRequest`` for parameters that move the end of the output, which a grammar determines."""
    if grammar is None:
        return
    for param in ("ignore_eos", "min_tokens"):
        if getattr(body, param):
            raise InvalidRequest(
                f"'{param}' conflicts with structured output, which ends where its grammar ends; remove one of them",
                param=param,
            )
    if body.allowed_token_ids:
        raise InvalidRequest(
            "'allowed_token_ids' conflicts with structured output, whose grammar may need other tokens; remove one of them",
            param="allowed_token_ids",
        )


def constrain_tool_calls(
    body: ToolFields,
    tools: Sequence[FunctionTool],
    tool_call_format: ToolCallFormat,
    grammar: Grammar | None,
    special_tokens: frozenset[str],
) -> Grammar | None:
    """Return the grammar of an output that must or may call ``tools``.

    ``grammar``: the constraint on an output without calls. The result is None where the output is free: ``tool_choice``
    is "auto", no tool is strict, and there is no ``grammar``. Raises ``InvalidRequest`` for combinations that no grammar
    can enforce.
    """
    schemas = [tool_schema(tool) for tool in tools]
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        named = [schema for schema in schemas if schema.name == choice.function.name]
        return structural_tag_grammar(tool_call_format.calls_format(named, parallel=False), "tools")
    if body.requires_call:
        return structural_tag_grammar(tool_call_format.calls_format(schemas, parallel=parallel), "tools")
    if grammar is None and not any(tool.function.strict for tool in tools):
        return None
    for schema in schemas:
        # Refused for its size, not for the format, which cannot express a schema that is too large for any grammar.
        json_schema_grammar(schema.parameters, "tools")
    if not tool_call_format.can_be_enforced(special_tokens):
        raise InvalidRequest(
            f"this model writes tool calls in the format {tool_call_format.name}, with special tokens that a grammar "
            "cannot enforce; 'strict' tools, and tools together with structured output, need "
            '"tool_choice": "required" or "none"',
            param="tools",
        )
    if not tool_call_format.can_express(schemas):
        raise InvalidRequest(
            f"this model writes tool calls in the format {tool_call_format.name}, in which a grammar cannot enforce the "
            "parameters of these tools; 'strict' tools, and tools together with structured output, need "
            '"tool_choice": "required" or "none"',
            param="tools",
        )
    if grammar is not None:
        alternatives = [to_structural_tag(grammar), tool_call_format.calls_format(schemas, parallel=parallel)]
        return structural_tag_grammar({"type": "or", "elements": alternatives}, "tools")
    triggered = tool_call_format.triggered_calls_format(schemas)
    if triggered is None:
        raise InvalidRequest(
            f"this model writes tool calls in the format {tool_call_format.name}, in which no marker begins a call; "
            '\'strict\' tools need "tool_choice": "required"',
            param="tools",
        )
    return structural_tag_grammar(triggered, "tools")


def tool_schema(tool: FunctionTool) -> ToolSchema:
    """Return the tool as a grammar needs it. Raises ``InvalidRequest`` if its parameters are no object."""
    parameters = tool.function.parameters
    if parameters is None:
        return ToolSchema(tool.function.name, _NO_ARGUMENTS)
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"the parameters of {tool.function.name!r} must be of type object", param="tools"
        )
    return ToolSchema(tool.function.name, {**parameters, "type": "object"})


def allow_reasoning_before(
    grammar: Grammar, start: ReasoningStart, reasoning_format: ReasoningFormat, special_tokens: frozenset[str]
) -> Grammar:
    """Extend ``grammar``, that of the output after the reasoning, to the whole text.

    A grammar cannot make the model write special tokens: where they are the markers of the reasoning, there is none.
    Raises ``InvalidRequest`` if the prompt has begun it.
    """
    if start is ReasoningStart.AFTER:
        return grammar
    if not special_tokens.isdisjoint(reasoning_format.markers):
        if start is ReasoningStart.OPTIONAL:
            return grammar
        raise InvalidRequest(
            f"this model ends its reasoning with the special token {reasoning_format.close}, which a grammar cannot "
            "enforce; turn the reasoning off, or send no structured output",
            param="response_format",
        )
    begin = "" if start is ReasoningStart.INSIDE else reasoning_format.open
    reasoning = {
        "type": "tag",
        "begin": begin,
        "content": {"type": "any_text"},
        "end": reasoning_format.close,
    }
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    head: dict[str, Any] = {"type": "sequence", "elements": [reasoning, gap]}
    if start is ReasoningStart.OPTIONAL:
        head = {"type": "optional", "content": head}
    whole = {"type": "sequence", "elements": [head, to_structural_tag(grammar)]}
    return structural_tag_grammar(whole, "response_format")
