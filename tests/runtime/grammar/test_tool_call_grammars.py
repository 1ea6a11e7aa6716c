"""Tool calls under a grammar are parsed by the parser of their format, with valid arguments."""

import json
from typing import Any

import pytest
from grammar_walker import Walker
from jsonschema import Draft202012Validator

from skiff_runtime.api.parsing.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from skiff_runtime.api.parsing.hermes import HERMES
from skiff_runtime.api.parsing.llama3 import LLAMA3
from skiff_runtime.api.parsing.mistral import JSON_LIST, MISTRAL, MISTRAL_V11
from skiff_runtime.api.parsing.output_format import select_reasoning_format, select_tool_call_format
from skiff_runtime.api.parsing.output_parser import ChatOutputParser
from skiff_runtime.api.parsing.pythonic import PYTHONIC
from skiff_runtime.api.parsing.qwen3_coder import QWEN3_CODER
from skiff_runtime.api.parsing.reasoning_parser import (
    DEEPSEEK_R1,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
)
from skiff_runtime.api.parsing.reasoning_parser import MISTRAL as MISTRAL_REASONING
from skiff_runtime.api.parsing.structured_outputs import allow_reasoning_before
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolCallOptions, ToolSchema
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
    to_structural_tag,
)

TOOLS = [
    ToolSchema("now", {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 8}}, "required": ["zone"]}),
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}}}),
]  # fmt: skip
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
FORMATS = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_V11,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "list": JSON_LIST,
}


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return Walker(tmp_path_factory.mktemp("model"))


def parse_calls(call_format: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Parse a text into its content and its calls."""
    parser = call_format.parser(ToolCallOptions(frozenset(SCHEMAS), schemas=SCHEMAS))
    deltas = [*parser.push(text), *parser.finish()]
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            call = calls.setdefault(delta.index, [delta.name or "", ""])
            call[1] += delta.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_enforced_calls_are_parsed(walker: Walker, name: str, parallel: bool) -> None:
    call_format = FORMATS[name]
    grammar = structural_tag_grammar(call_format.calls_format(TOOLS, parallel=parallel), "tools")
    texts = list(walker.walk(grammar, name, 12))
    counts = set()
    for text in texts:
        content, calls = parse_calls(call_format, text)
        assert not content, text
        for tool, arguments in calls:
            Draft202012Validator(SCHEMAS[tool]).validate(arguments)
        counts.add(len(calls))
    assert texts
    assert counts == {1} if not parallel else min(counts) == 1


def test_either_a_call_or_an_answer_is_enforced(walker: Walker) -> None:
    formats = [
        to_structural_tag(choice_grammar(["yes", "no"], "x")),
        HERMES.calls_format(TOOLS, parallel=False),
    ]
    seen = set()
    for text in walker.walk(structural_tag_grammar({"type": "or", "elements": formats}, "x"), "either", 12):
        content, calls = parse_calls(HERMES, text)
        assert (content in ("yes", "no")) != bool(calls)
        seen.add(bool(calls))
    assert seen == {True, False}


@pytest.mark.parametrize("call_format", [HERMES, QWEN3_CODER], ids=lambda each: each.name)
def test_calls_within_text_have_valid_arguments(walker: Walker, call_format: ToolCallFormat) -> None:
    triggered = call_format.triggered_calls_format(TOOLS)
    assert triggered is not None
    texts = list(walker.walk(structural_tag_grammar(triggered, "tools"), "free", 4))
    assert texts
    for text in texts:
        for tool, arguments in parse_calls(call_format, text)[1]:
            Draft202012Validator(SCHEMAS[tool]).validate(arguments)


def test_formats_without_a_marker_have_no_grammar_of_calls_within_text() -> None:
    assert LLAMA3.triggered_calls_format(TOOLS) is PYTHONIC.triggered_calls_format(TOOLS) is None


MANY = {f"p{index}": {"type": "integer"} for index in range(9)}


@pytest.mark.parametrize(
    ("schema", "in_xml", "in_python"),
    [
        ({"type": "object", "additionalProperties": False}, True, True),
        ({"properties": {"a": {"enum": ["x", "y z"]}, "b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}, True, True),
        ({"properties": {"a": {"type": "string", "maxLength": 2000}}}, False, True),
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, False, True),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}, False, True),
        ({"properties": {"a b": {"type": "integer"}}}, True, False),
        ({"properties": {"class": {"type": "integer"}}}, True, False),
        ({"properties": {"a>b": {"type": "integer"}}}, False, False),
        ({"properties": MANY}, True, False),
        ({"properties": MANY, "required": ["p8"]}, True, True),
        ({"type": "object"}, False, False),
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, False, False),
        ({"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]}, False, False),
        ({"properties": {}, "required": ["a"]}, False, False),
        ({"properties": MANY, "$defs": {"x": {"enum": ["x" * 20_000]}}}, False, False),
    ],
)  # fmt: skip
def test_tools_that_a_format_cannot_express(
    walker: Walker, schema: dict[str, Any], in_xml: bool, in_python: bool
) -> None:
    tools = [ToolSchema("now", {"type": "object", **schema})]
    for call_format, expected in ((QWEN3_CODER, in_xml), (PYTHONIC, in_python)):
        assert call_format.can_express(tools) == expected
        if expected:
            grammar = structural_tag_grammar(call_format.calls_format(tools, parallel=False), "tools")
            texts = list(walker.walk(grammar, "express", 2))
            options = ToolCallOptions(frozenset(("now",)), schemas={"now": tools[0].parameters})
            for text in texts:
                deltas = call_format.parser(options).push(text)
                arguments = "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))
                Draft202012Validator(tools[0].parameters).validate(json.loads(arguments))
            assert texts


@pytest.mark.parametrize("start", [ReasoningStart.INSIDE, ReasoningStart.OPTIONAL])
@pytest.mark.parametrize(
    "grammar",
    [
        choice_grammar(["yes", "no"], "x"),
        regex_grammar("[ab]{3}", "x"),
        json_schema_grammar({"type": "integer", "minimum": 0, "maximum": 9}, "x"),
    ],
    ids=["choice", "regex", "schema"],
)
def test_grammar_applies_after_the_reasoning(walker: Walker, grammar: Any, start: ReasoningStart) -> None:
    grammar_after_reasoning = allow_reasoning_before(grammar, start, THINK, frozenset())
    for text in walker.walk(grammar_after_reasoning, str(start), 8):
        parser = ChatOutputParser(ReasoningParser(start), None)
        deltas = [*parser.push(text), *parser.finish()]
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        assert content in ("yes", "no") or content.isdigit() or set(content) <= set("ab")
        assert content
        assert all(isinstance(delta, ContentDelta | ReasoningDelta) for delta in deltas)


@pytest.mark.parametrize(
    ("choice", "template", "found"),
    [
        ("auto", None, None),
        ("auto", "{{ messages }}", None),
        ("auto", "{% if tools %}<tool_call>{% endif %}", HERMES),
        ("auto", "{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("auto", "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", MISTRAL_V11),
        ("auto", "<|start_header_id|>{% if tools %}parameters{% endif %}", LLAMA3),
        ("auto", "{% if tools %}<tool_call><function=a><parameter=b>{% endif %}", QWEN3_CODER),
        ("auto", "{% if tools %}<tool_call>{# not <function= #}{% endif %}", HERMES),
        ("auto", "<|header_start|>{% if tools %}parameters{% endif %}", PYTHONIC),
        (
            "auto",
            "<|start_header_id|>{% if tools %}[func_name1(params_name1=params_value1...){% endif %}",
            PYTHONIC,
        ),
        ("pythonic", None, PYTHONIC),
        ("qwen3_coder", "{% if tools %}<tool_call>{% endif %}", QWEN3_CODER),
        ("none", "{% if tools %}<tool_call>{% endif %}", None),
        ("llama3", "{% if tools %}<tool_call>{% endif %}", LLAMA3),
    ],
)
def test_tool_call_format_is_found_in_the_template(
    choice: str, template: str | None, found: ToolCallFormat | None
) -> None:
    assert select_tool_call_format(choice, template) is found


@pytest.mark.parametrize(
    ("choice", "template", "found"),
    [
        ("auto", None, None),
        ("auto", "{{ messages }}", None),
        ("auto", "{{ text.split('</think>')[-1] }}", THINK),
        ("auto", "[THINK]{{ thinking }}[/THINK]", MISTRAL_REASONING),
        ("none", "<think>", None),
        ("think", None, THINK),
        ("deepseek_r1", "<think>", DEEPSEEK_R1),
        ("mistral", None, MISTRAL_REASONING),
    ],
)
def test_reasoning_format_is_found_in_the_template(
    choice: str, template: str | None, found: ReasoningFormat | None
) -> None:
    assert select_reasoning_format(choice, template) is found


def test_reasoning_between_special_tokens_is_left_out_under_a_grammar() -> None:
    grammar, special = choice_grammar(["yes"], "x"), frozenset(MISTRAL_REASONING.markers)
    assert allow_reasoning_before(grammar, ReasoningStart.OPTIONAL, MISTRAL_REASONING, special) is grammar
    with pytest.raises(InvalidRequest, match="special token"):
        allow_reasoning_before(grammar, ReasoningStart.INSIDE, MISTRAL_REASONING, special)
