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
from skiff_runtime.api.parsing.output_format import select_tool_call_format
from skiff_runtime.api.parsing.output_parser import ChatOutputParser
from skiff_runtime.api.parsing.reasoning_parser import ReasoningParser, ReasoningStart
from skiff_runtime.api.parsing.structured_outputs import allow_reasoning_before
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat, ToolCallOptions, ToolSchema
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
    "list": JSON_LIST,
}


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return Walker(tmp_path_factory.mktemp("model"))


def parse_calls(call_format: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Parse a text into its content and its calls."""
    parser = call_format.parser(ToolCallOptions(frozenset(SCHEMAS)))
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


def test_calls_within_text_have_valid_arguments(walker: Walker) -> None:
    triggered = HERMES.triggered_calls_format(TOOLS)
    assert triggered is not None
    texts = list(walker.walk(structural_tag_grammar(triggered, "tools"), "free", 4))
    assert texts
    for text in texts:
        for tool, arguments in parse_calls(HERMES, text)[1]:
            Draft202012Validator(SCHEMAS[tool]).validate(arguments)
    assert LLAMA3.triggered_calls_format(TOOLS) is None


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
    grammar_after_reasoning = allow_reasoning_before(grammar, start)
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
        ("none", "{% if tools %}<tool_call>{% endif %}", None),
        ("llama3", "{% if tools %}<tool_call>{% endif %}", LLAMA3),
    ],
)
def test_tool_call_format_is_found_in_the_template(
    choice: str, template: str | None, found: ToolCallFormat | None
) -> None:
    assert select_tool_call_format(choice, template) is found
