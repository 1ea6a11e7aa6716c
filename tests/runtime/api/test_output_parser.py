"""Reasoning and tool calls are parsed to the same message however the text is cut."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, OutputParser, ReasoningDelta
from skiff_runtime.api.parsing.hermes import HermesParser
from skiff_runtime.api.parsing.llama3 import Llama3Parser
from skiff_runtime.api.parsing.mistral import JsonListParser, MistralParser
from skiff_runtime.api.parsing.output_parser import ChatOutputParser
from skiff_runtime.api.parsing.parameter_types import ANY, find_types
from skiff_runtime.api.parsing.pythonic import PythonicParser
from skiff_runtime.api.parsing.qwen3_coder import Qwen3CoderParser
from skiff_runtime.api.parsing.reasoning_parser import (
    DEEPSEEK_R1,
    MISTRAL,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
)
from skiff_runtime.api.parsing.tool_parser import ContentParser, ToolCallOptions, ToolParser

NAMES = frozenset(("now", "add"))
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
SCHEMAS: dict[str, Any] = {
    "now": {
        "properties": {
            "zone": {"type": "string"},
            "hour": {"type": "integer"},
            "share": {"type": "number"},
            "utc": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["string", "integer"]},
            "any": {},
            "style": {"enum": ["x", 3]},
            "ref": {"$ref": "#/$defs/list"},
            "both": {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]},
        },
        "$defs": {"list": {"type": "array"}},
    },
    "add": {"properties": {"a": {"type": "array"}}},
}
ENFORCED_PARSERS: dict[str, type[ToolParser]] = {**PARSERS, "list": JsonListParser}
"""And that of a format that models write only because a grammar makes them."""


@dataclass
class Message:
    """A message that a client assembles from deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        msgspec.json.encode(delta)  # as the formatters do: no delta has half of a surrogate pair
        if isinstance(delta, ContentDelta):
            self.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
        elif delta.name is not None:
            assert delta.id
            assert delta.index == len(self.calls)
            self.calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + delta.arguments)


def parse(parser: OutputParser, pieces: Sequence[str]) -> Message:
    message = Message()
    for piece in pieces:
        for delta in parser.push(piece):
            message.add(delta)
    for delta in parser.finish():
        message.add(delta)
    return message


def make_parser_of(
    kind: str, start: ReasoningStart | None = None, **options: object
) -> Callable[[], OutputParser]:
    tools = ToolCallOptions(NAMES, schemas=SCHEMAS, **options)  # type: ignore[arg-type]

    def make() -> OutputParser:
        return ChatOutputParser(
            None if start is None else ReasoningParser(start), ENFORCED_PARSERS[kind](tools)
        )

    return make


def parse_in_every_cut(make: Callable[[], OutputParser], text: str) -> Message:
    """Parse ``text`` as a whole, by characters and in random parts, check that the messages are equal, and return one."""
    whole = parse(make(), [text])
    assert parse(make(), list(text)) == whole
    cuts = random.Random(text)
    for _ in range(5):
        positions = sorted(cuts.sample(range(len(text) + 1), min(4, len(text))))
        ends = [0, *positions, len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        assert parse(make(), pieces) == whole
    return whole


NOW = ("now", '{"zone": "Köln"}')
SURROGATE_IN_TEXT = r'<tool_call>{"name": "now", "arguments": "{\"zone\": \"\ud800\"}"}</tool_call>'
ADD = ("add", '{"a": [1, {"b": "}]"}]}')


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "Just text. ", "Just text. ", []),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>', "", [NOW]),
        (
            "hermes",
            'Wait.\n<tool_call>{"arguments": {"zone": "Köln"}, "name": "now"}</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}]"}]}}\n</tool_call>\n',
            "Wait.",
            [NOW, ADD],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"zone\\": 1}"}</tool_call>', "", [("now", '{"zone": 1}')]),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
        ("hermes", "<tool_call>now</tool_call> is it", "<tool_call>now</tool_call> is it", []),
        ("hermes", "a < b <tool_cal", "a < b <tool_cal", []),
        ("hermes", '<tool_call>{"name": "now", "argum', '<tool_call>{"name": "now", "argum', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"zo', "", [("now", '{"zo')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} and on', "and on", [("now", "{}")]),
        ("hermes", r'<tool_call>{"name": "now", "arguments": {"zone": "\ud800"}}</tool_call>', "", [("now", r'{"zone": "\ud800"}')]),
        ("hermes", SURROGATE_IN_TEXT, SURROGATE_IN_TEXT, []),
        ("llama3", '{"name": "now", "parameters": {"zone": "Köln"}}', "", [NOW]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {"zone": "Köln"}}; {"name": "add", "parameters": {"a": [1, {"b": "}]"}]}}', "", [NOW, ADD]),
        ("llama3", '\n{"answer": 42}', '\n{"answer": 42}', []),
        ("llama3", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        ("llama3", "It is {late}.", "It is {late}.", []),
        ("llama3", "{", "{", []),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {"zone": "Köln"}}, {"name": "add", "arguments": {"a": [1, {"b": "}]"}]}}]', "", [NOW, ADD]),
        ("mistral", 'Yes.[TOOL_CALLS]now[ARGS]{"zone": "Köln"}[TOOL_CALLS]add[ARGS]{"a": [1, {"b": "}]"}]}', "Yes.", [NOW, ADD]),
        ("mistral", '[TOOL_CALLS]now{"zone": "Köln"}', "", [NOW]),
        ("mistral", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
        ("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", []),
        ("pythonic", '[now(zone="Köln")]', "", [NOW]),
        ("pythonic", "\n[now(zone='Köln'), add(a=[1, {'b': '}]'},],) ]\n", "", [NOW, ADD]),
        ("pythonic", '<|python_start|>[now(zone="Köln")]<|python_end|>', "", [NOW]),
        ("pythonic", "Yes.<|python_start|>[ now( ) ] and on", "Yes.and on", [("now", "{}")]),
        ("pythonic", "[now(),]\n[now()]", "", [("now", "{}")] * 2),
        ("pythonic", "[now(a=-1, b=2.5e+3, c=True, d=null, e=0x1F)]", "", [("now", '{"a": -1, "b": 2500.0, "c": true, "d": null, "e": 31}')]),
        ("pythonic", r"[now(a='it\'s', b='', c='\d\x41\ud83d\ude42\n')]", "", [("now", r'{"a": "it' + "'" + r's", "b": "", "c": "\\dA\ud83d\ude42\n"}')]),
        ("pythonic", '[now(a="""x"\'\ny""")]', "", [("now", '{"a": "x\\"\'\\ny"}')]),
        ("pythonic", "[other(), now()]", "[other(), now()]", []),
        ("pythonic", "[now(), other(a=1)]", ",other(a=1)]", [("now", "{}")]),
        ("pythonic", "[now(zone=Köln)]", "[now(zone=Köln)]", []),
        ("pythonic", "[now(zone=inf)]", "[now(zone=inf)]", []),
        ("pythonic", "[now(a=f(1))]", "[now(a=f(1))]", []),
        ("pythonic", "[now and then]", "[now and then]", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[]", "[]", []),
        ("pythonic", "I call [now()].", "I call [now()].", []),
        ("pythonic", "[now(a=1 b=2)]", "b=2)]", [("now", '{"a": 1}')]),
        ("pythonic", "[now(a=[1, x])]", "])]", [("now", '{"a": [1, null]}')]),
        ("pythonic", "[now(a={'b' 1})]", "1})]", [("now", '{"a": {"b": null}}')]),
        ("pythonic", "[now(zone='K", "", [("now", '{"zone": "K')]),
        ("pythonic", "[now(zone=", "[now(zone=", []),
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=zone>\nKöln\n</parameter>\n</function>\n</tool_call>", "", [NOW]),
        (
            "qwen3_coder",
            "Wait.\n<function=now><parameter=zone>Köln</parameter></function></tool_call>\n"
            '<tool_call><function=add>\n<parameter=a>\n[1, {"b": "}]"}]\n</parameter></function></tool_call>',
            "Wait.",
            [NOW, ADD],
        ),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", "", [("now", "{}")]),
        ("qwen3_coder", "<tool_call><function=now></tool_call>", "", [("now", "{}")]),
        ("qwen3_coder", "<function=now><parameter=hour>\n7\n</parameter><parameter=share>.5</parameter><parameter=utc>True</parameter></function>", "", [("now", '{"hour": 7, "share": 0.5, "utc": true}')]),
        ("qwen3_coder", "<function=now><parameter=hour>7.0</parameter><parameter=utc>maybe</parameter></function>", "", [("now", '{"hour": 7, "utc": "maybe"}')]),
        ("qwen3_coder", "<function=now><parameter=zone>null</parameter><parameter=note>\nnull\n</parameter></function>", "", [("now", '{"zone": "null", "note": null}')]),
        ("qwen3_coder", "<function=now><parameter=note>nullable</parameter><parameter=size>3</parameter></function>", "", [("now", '{"note": "nullable", "size": 3}')]),
        ("qwen3_coder", "<function=now><parameter=any>[1]</parameter><parameter=style>3</parameter><parameter=ref>['a']</parameter></function>", "", [("now", '{"any": [1], "style": 3, "ref": ["a"]}')]),
        ("qwen3_coder", r"<function=add><parameter=a>['\ud800']</parameter></function>", "", [("add", r"""{"a": "['\\ud800']"}""")]),
        ("qwen3_coder", r'<function=add><parameter=a>["\ud83d\ude42"]</parameter></function>', "", [("add", '{"a": ["🙂"]}')]),
        ("qwen3_coder", "<function=now><parameter=both>3</parameter><parameter=else>3</parameter></function>", "", [("now", '{"both": "3", "else": "3"}')]),
        ("qwen3_coder", '<function=now><parameter=zone>\n\n a < b </param>\n"q"\n\n</parameter></function>', "", [("now", '{"zone": "\\n a < b </param>\\n\\"q\\"\\n"}')]),
        ("qwen3_coder", "<function=other></function>", "<function=other></function>", []),
        ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
        ("qwen3_coder", "Write <function=now>, then stop.", "Write <function=now>, then stop.", []),
        ("qwen3_coder", "<function=now><parameter=zone>Köln</parameter> and on", "and on", [NOW]),
        ("qwen3_coder", "<function=now><parameter=zone>Kö", "", [("now", '{"zone": "Kö')]),
        ("qwen3_coder", "<tool_call><function=no", "<tool_call><function=no", []),
    ],
)  # fmt: skip
def test_calls_are_parsed_in_each_format(
    kind: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    message = parse_in_every_cut(make_parser_of(kind), text)
    assert (message.content, message.calls) == (content, calls)


@pytest.mark.parametrize("kind", PARSERS)
def test_arguments_are_streamed(kind: str) -> None:
    before = {
        "pythonic": "[now(zone=",
        "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=zone>\n",
        "hermes": '<tool_call>{"name": "now", "arguments": ',
        "llama3": '{"name": "now", "parameters": ',
        "mistral": "[TOOL_CALLS]now[ARGS]",
    }
    parser = make_parser_of(kind)()
    parser.push(before[kind])
    pieces = ('{"zone"', ': "K', 'öln"') if kind in ("hermes", "llama3", "mistral") else ('"K', "ö", "ln")
    deltas = [parser.push(piece) for piece in pieces]
    assert all(deltas), deltas


@pytest.mark.parametrize(
    ("kind", "begin", "end"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"zone": "', '"}}</tool_call>'),
        ("pythonic", '[now(zone="', '")]'),
    ],
)
def test_long_argument_arrives_whole(kind: str, begin: str, end: str) -> None:
    value = "x" * 200_000
    message = parse(make_parser_of(kind)(), [begin + value + end])
    assert (message.content, message.calls) == ("", [("now", f'{{"zone": "{value}"}}')])


@pytest.mark.parametrize(
    ("kind", "call", "separator", "begun"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>', "\n", '<tool_call>\n{"name": "ad'),
        ("llama3", '{"name": "now", "parameters": {"zone": "Köln"}}', "; ", '{"name": "ad'),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"zone": "Köln"}', "", "[TOOL_CALLS]ad"),
        ("list", '[{"name": "now", "arguments": {"zone": "Köln"}}', ", ", '{"name": "ad'),
    ],
)  # fmt: skip
def test_begun_call_is_no_content_where_calls_are_enforced(
    kind: str, call: str, separator: str, begun: str
) -> None:
    """However early the end of the text cuts it off: before, inside of or after its marker or its name."""
    rest = separator + begun
    for length in range(len(rest) + 1):
        message = parse_in_every_cut(make_parser_of(kind, is_enforced=True), call + rest[:length])
        assert (message.content, message.calls) == ("", [NOW]), rest[:length]
        if kind != "list":
            alone = parse_in_every_cut(make_parser_of(kind, is_enforced=True), begun[:length])
            assert (alone.content, alone.calls) == ("", [])


def test_calls_beyond_max_calls_are_dropped() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = parse_in_every_cut(make_parser_of("hermes", max_calls=1), call * 3)
    assert (message.calls, message.content) == ([("now", "{}")], "")


def test_special_tokens_are_dropped_from_the_content() -> None:
    message = parse_in_every_cut(
        make_parser_of("mistral", special_tokens=("[TOOL_CALLS]", "<s>", "[/INST]")), "<s>Hello[/INST], [INST"
    )
    assert message.content == "Hello, [INST"


def test_special_tokens_are_dropped_from_an_answer_without_tools() -> None:
    options = ToolCallOptions(frozenset(), special_tokens=("<s>", "[/INST]"))
    message = parse_in_every_cut(
        lambda: ChatOutputParser(ReasoningParser(ReasoningStart.OPTIONAL, MISTRAL), ContentParser(options)),
        "[THINK]hm[/THINK]\n<s>Yes[/INST]. <s",
    )
    assert (message.reasoning, message.content) == ("hm", "Yes. <s")


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (ReasoningStart.INSIDE, "\n<think>\nhm</think>Yes", "hm", "Yes"),
        (ReasoningStart.INSIDE, " <th", "<th", ""),
        (ReasoningStart.OPTIONAL, "<think>\nhm \n m\n</think>\n\nYes. ", "hm \n m", "Yes. "),
        (ReasoningStart.OPTIONAL, "  <think></think>Yes", "", "Yes"),
        (ReasoningStart.OPTIONAL, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (ReasoningStart.OPTIONAL, "<think>never ends <", "never ends <", ""),
        (ReasoningStart.OPTIONAL, " <th", "", " <th"),
        (ReasoningStart.INSIDE, "hm\n</think>\nYes", "hm", "Yes"),
        (ReasoningStart.INSIDE, "hm", "hm", ""),
        (ReasoningStart.AFTER, "Yes", "", "Yes"),
    ],
)
def test_reasoning_is_divided_from_the_content(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    message = parse_in_every_cut(lambda: ChatOutputParser(ReasoningParser(start), None), text)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize("reasoning_format", [THINK, DEEPSEEK_R1, MISTRAL], ids=lambda each: each.name)
def test_reasoning_is_found_between_the_markers_of_its_format(reasoning_format: ReasoningFormat) -> None:
    start = reasoning_format.detect_start("<user>x<assistant>")
    first = "" if start is ReasoningStart.INSIDE else reasoning_format.open
    message = parse_in_every_cut(
        lambda: ChatOutputParser(ReasoningParser(start, reasoning_format), None),
        f"{first}hm [THIN <thin {reasoning_format.close}\nYes",
    )
    assert (message.reasoning, message.content) == ("hm [THIN <thin", "Yes")
    assert reasoning_format.detect_start(f"x{reasoning_format.open}\n") is ReasoningStart.INSIDE
    assert reasoning_format.detect_start(f"x{reasoning_format.close}\n\n") is ReasoningStart.AFTER
    assert reasoning_format.find_start(f"{reasoning_format.open}hm") is ReasoningStart.INSIDE
    assert reasoning_format.find_start("Yes") is ReasoningStart.AFTER


def test_calls_after_reasoning() -> None:
    text = 'I think <tool_call> of it</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = parse_in_every_cut(make_parser_of("hermes", ReasoningStart.INSIDE), text)
    assert (message.reasoning, message.calls, message.content) == (
        "I think <tool_call> of it",
        [("now", "{}")],
        "",
    )


FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "now", "add",
        "<", "[", "]", "{", "}", '"', "\\", ":", ",", ";", " ", "\n", '"name"', '"arguments"', '"parameters"', '"now"',
        '{"name": "now", "arguments": {', '{"zone": "x"}', "null", "12", "é🙂", "text",
        "[THINK]", "[/THINK]", "<|python_start|>", "<|python_end|>", "[now(", "(", ")", "zone=", "=", "'", "[now(zone='x'", "True", "\\u00e9",
        "\\ud800", '["\\ud800"]', r'"{\"a\": \"\ud800\"}"', "<parameter=ref>", "<function=now><parameter=ref>", '{"name": "now", "arguments": ',
        "<function=", "<function=now>", "<parameter=", "<parameter=zone>", "<parameter=hour>", "</parameter>", "</function>", ">",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(FRAGMENTS, max_size=14),
    kind=st.sampled_from(sorted(PARSERS)),
    start=st.sampled_from([None, *ReasoningStart]),
)
def test_any_text_is_parsed_alike_however_it_is_cut(
    pieces: list[str], kind: str, start: ReasoningStart | None
) -> None:
    message = parse_in_every_cut(make_parser_of(kind, start), "".join(pieces))
    for name, arguments in message.calls:
        assert name in NAMES
        assert arguments.startswith("{")


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<[{"), max_size=60),
    kind=st.sampled_from(sorted(PARSERS)),
)
def test_plain_text_is_unchanged_content(text: str, kind: str) -> None:
    assert parse_in_every_cut(make_parser_of(kind), text).content == text


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(arguments=ARGUMENTS, indent=st.sampled_from([None, 2]))
def test_arguments_are_unchanged(arguments: dict[str, object], indent: int | None) -> None:
    text = json.dumps(arguments, indent=indent, ensure_ascii=False)
    message = parse_in_every_cut(
        make_parser_of("hermes"), f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>'
    )
    assert message.calls == [("add", text)]


@settings(max_examples=100, deadline=None)
@given(arguments=ARGUMENTS, write=st.sampled_from([repr, json.dumps]))
def test_literals_of_python_and_json_become_json(
    arguments: dict[str, object], write: Callable[[object], str]
) -> None:
    message = parse_in_every_cut(make_parser_of("pythonic"), f"[add(a={write(arguments)}, b=1), now()]")
    [(name, text), second] = message.calls
    assert (name, json.loads(text)) == ("add", {"a": arguments, "b": 1})
    assert (message.content, second) == ("", ("now", "{}"))


@settings(max_examples=100, deadline=None)
@given(
    zone=st.text(max_size=12).filter(lambda text: "</parameter>" not in text),
    values=st.lists(st.integers() | st.text(alphabet="<ab\n\"'\\", max_size=8), max_size=3),
)
def test_text_and_json_in_xml_become_json(zone: str, values: list[object]) -> None:
    text = (
        f"<tool_call>\n<function=now>\n<parameter=zone>\n{zone}\n</parameter>\n<parameter=ref>\n"
        f"{json.dumps(values)}\n</parameter>\n</function>\n</tool_call>"
    )
    message = parse_in_every_cut(make_parser_of("qwen3_coder"), text)
    [(_, arguments)] = message.calls
    assert json.loads(arguments) == {"zone": zone, "ref": values}


def test_types_of_schemas_that_refer_to_each_other_are_found_in_bounded_time() -> None:
    loops = {
        f"t{index}": {"anyOf": [{"$ref": f"#/$defs/t{each}"} for each in range(20)]} for index in range(20)
    }
    assert find_types({"$ref": "#/$defs/t0"}, {"$defs": loops}) == ANY


BREAKING_FRAGMENTS = {
    "pythonic": ["a=", "b=", ",", " ", "[", "]", "{", "}", "(", ")", ":", "'x'", "1", "-", "None", "tru", "\n", "'k':"],
    "qwen3_coder": ["<parameter=zone>", "<parameter=hour>", "</parameter>", "</function>", "<function=now>", "x", "1", "\n", "<", ">"],
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(BREAKING_FRAGMENTS)))
def test_a_call_that_breaks_has_arguments_in_json(data: st.DataObject, kind: str) -> None:
    pieces = data.draw(st.lists(st.sampled_from(BREAKING_FRAGMENTS[kind]), max_size=12))
    start = {"pythonic": "[now(a=1,", "qwen3_coder": "<function=now><parameter=hour>1</parameter>"}[kind]
    end = {"pythonic": "?", "qwen3_coder": "</parameter></function>"}[kind]
    message = parse_in_every_cut(make_parser_of(kind), start + "".join(pieces) + end)
    for _, arguments in message.calls:
        assert isinstance(json.loads(arguments), dict), arguments
    assert message.calls
