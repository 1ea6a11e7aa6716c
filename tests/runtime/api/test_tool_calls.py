"""Tools and reasoning through the OpenAI client: the prompt, the enforced grammar, and the parsed response."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from accepted_texts import accepted_texts
from frontend import NAME, Frontend, running_frontend, write_model
from tiny_models import edit_json

from skiff_runtime.api.parsing import reasoning_parser
from skiff_runtime.api.parsing.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from skiff_runtime.api.parsing.output_format import OutputFormat, effort_hints
from skiff_runtime.api.parsing.output_parser import OutputPlan, plan_output
from skiff_runtime.api.parsing.pythonic import PYTHONIC
from skiff_runtime.api.parsing.qwen3_coder import QWEN3_CODER
from skiff_runtime.api.parsing.reasoning_parser import ReasoningStart
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat
from skiff_runtime.api.schemas.request_bodies import ChatCompletionRequest
from skiff_runtime.config import Config
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import ChatPrompt, FinishReason, GenerateRequest
from skiff_runtime.vocabulary.chat_template import ChatTemplate

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.zone }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "nothing"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'


OTHER = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return the tool choice of a subset of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model"))
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    return model


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model) as front:
        yield front


@pytest.fixture(scope="module")
def client(front: Frontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)


def complete(
    front: Frontend,
    client: openai.OpenAI,
    text: str,
    finish: FinishReason = FinishReason.STOP,
    **options: Any,
) -> tuple[GenerateRequest, Any]:
    """Return the request as rank 0 received it, and the completion, or the list of its chunks, as the client received it."""

    def ask() -> Any:
        options.setdefault("messages", MESSAGES)
        reply = client.chat.completions.create(model=NAME, **options)
        return list(reply) if options.get("stream") else reply

    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, text)
        front.rank.finish(request.uid, finish)
        return request, reply.result()


def prompt_text(front: Frontend, request: GenerateRequest) -> str:
    return str(front.rank.tokenizer.decode(front.rank.prompt_ids(request)))


def test_full_response_has_complete_calls(front: Frontend, client: openai.OpenAI) -> None:
    request, reply = complete(front, client, f"Wait. {CALL}\n{CALL}", tools=TOOLS)
    assert prompt_text(front, request).startswith('{"type": "function", "function": {"name": "now", "desc')
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("now", {"zone": "Köln"})
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert request.grammar is None


def test_arguments_of_calls_are_streamed(front: Frontend, client: openai.OpenAI) -> None:
    _, chunks = complete(front, client, CALL, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (calls[0].index, calls[0].function.name, bool(calls[0].id)) == (0, "now", True)
    assert "".join(call.function.arguments for call in calls) == '{"zone": "Köln"}'
    assert len(calls) > 5
    assert not "".join(delta.content or "" for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_and_tool_results_are_rendered_in_the_prompt(front: Frontend, client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "Köln"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    request, _ = complete(front, client, "It is noon.", messages=messages, tools=TOOLS)
    expected = "<user>x<assistant><tool_call>nowKöln</tool_call><tool>12:00<assistant>"
    assert prompt_text(front, request).endswith(expected)


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        ("required", True, {CALL, OTHER, f"{CALL}\n{OTHER}"}),
        ("required", False, {CALL, OTHER}),
        (NAMED, None, {CALL}),
        (NAMED, True, {CALL}),
        (allowed("required", "now"), None, {CALL}),
        (allowed("required", "now", "nothing"), None, {CALL, OTHER, f"{CALL}\n{OTHER}"}),
    ],
)
def test_required_calls_are_enforced_by_grammar(
    front: Frontend,
    client: openai.OpenAI,
    model: Path,
    choice: Any,
    parallel: bool | None,
    expected: set[str],
) -> None:
    options: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
    request, reply = complete(front, client, CALL, tools=TOOLS, tool_choice=choice, **options)
    assert reply.choices[0].message.tool_calls[0].function.name == "now"
    texts = (
        CALL,
        OTHER,
        f"{CALL}\n{OTHER}",
        "Yes.",
        CALL.replace("zone", "zona"),
        CALL.replace("now", "new"),
        "",
    )
    assert accepted_texts(model, request.grammar, texts) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 2),
        ({"parallel_tool_calls": True}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": NAMED}, 1),
    ],
)
def test_second_call_is_dropped_if_calls_are_not_parallel(
    front: Frontend, client: openai.OpenAI, options: dict[str, Any], count: int, stream: bool
) -> None:
    _, reply = complete(front, client, f"{CALL}\n{CALL}", tools=TOOLS, stream=stream, **options)
    if stream:
        indices = {call.index for chunk in reply for call in chunk.choices[0].delta.tool_calls or ()}
    else:
        indices = set(range(len(reply.choices[0].message.tool_calls)))
    assert indices == set(range(count))


def test_tool_choice_none_offers_no_tools(front: Frontend, client: openai.OpenAI) -> None:
    request, reply = complete(front, client, "a <tool_call> b", tools=TOOLS, tool_choice="none")
    assert "function" not in prompt_text(front, request)
    assert reply.choices[0].message.content == "a <tool_call> b"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(front: Frontend, client: openai.OpenAI, mode: str) -> None:
    request, reply = complete(front, client, CALL, tools=TOOLS, tool_choice=allowed(mode, "now"))
    assert "nothing" not in prompt_text(front, request) and '"name": "now"' in prompt_text(front, request)
    assert (request.grammar is None) == (mode == "auto")
    assert len(reply.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_second_required_call_that_is_cut_short_is_no_content(
    front: Frontend, client: openai.OpenAI, stream: bool
) -> None:
    text = f'{CALL}\n<tool_call>\n{{"name": "no'
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "stream": stream}
    _, reply = complete(front, client, text, FinishReason.LENGTH, **options)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply]
        assert not "".join(delta.content or "" for delta in deltas)
        assert {call.index for delta in deltas for call in delta.tool_calls or ()} == {0}
        assert reply[-1].choices[0].finish_reason == "length"
    else:
        message = reply.choices[0].message
        assert (message.content, len(message.tool_calls)) == (None, 1)
        assert reply.choices[0].finish_reason == "length"


def test_call_that_was_cut_short_is_sent_back(front: Frontend, client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "Kö'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    request, _ = complete(front, client, "Sorry.", messages=messages)
    assert "<tool_call>now" in prompt_text(front, request)


def test_malformed_call_is_content(front: Frontend, client: openai.OpenAI) -> None:
    text = 'Write <tool_call>{"nam": 1}</tool_call> so.'
    _, reply = complete(front, client, text, tools=TOOLS)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "<think>\nhm\n</think>\n\nYes."), ({"enable_thinking": True}, "hm</think>Yes.")],
)
def test_reasoning_is_divided_from_the_content(
    front: Frontend, client: openai.OpenAI, options: dict[str, bool], text: str, stream: bool
) -> None:
    extra = {"chat_template_kwargs": options}
    _, reply = complete(front, client, text, stream=stream, extra_body=extra)
    parts = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "hm"
    assert "".join(part.content or "" for part in parts) == "Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(front: Frontend, client: openai.OpenAI, stream: bool) -> None:
    extra = {"include_reasoning": False}
    _, reply = complete(front, client, "<think>\nhm\n</think>\n\nYes.", stream=stream, extra_body=extra)
    parts = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
    assert not any(getattr(part, "reasoning_content", None) for part in parts)
    assert "".join(part.content or "" for part in parts) == "Yes."


@pytest.mark.parametrize(
    ("effort", "options", "output", "prompt_end"),
    [
        ("none", {}, "Yes.", "<think></think>"),
        ("low", {}, "hm</think>Yes.", "<think>"),
        ("none", {"enable_thinking": True}, "hm</think>Yes.", "<think>"),
    ],
)
def test_reasoning_effort_reaches_the_switch_of_the_template(
    front: Frontend,
    client: openai.OpenAI,
    effort: str,
    options: dict[str, bool],
    output: str,
    prompt_end: str,
) -> None:
    """An option of the template wins over it, and the output is parsed as the prompt begins it."""
    extra = {"chat_template_kwargs": options}
    request, reply = complete(front, client, output, reasoning_effort=effort, extra_body=extra)
    assert prompt_text(front, request).endswith(f"<assistant>{prompt_end}")
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content or "") == (
        "Yes.",
        output.partition("</think>")[0] if "</think>" in output else "",
    )


EFFORT_TEMPLATE = "<assistant><think>{% if reasoning_effort == 'none' %}</think>{% endif %}"


@pytest.mark.parametrize("template", [TEMPLATE + "{# <think> #}", EFFORT_TEMPLATE], ids=["switch", "effort"])
def test_reasoning_starts_as_the_rendered_prompt_ends(tmp_path: Path, template: str) -> None:
    model = write_model(tmp_path)
    edit_json(model / "tokenizer_config.json", chat_template=template)
    launch: Any = SimpleNamespace(
        model=SimpleNamespace(path=model, tokenizer_path=None),
        config=Config(model=str(model)),
    )
    output_format = OutputFormat.from_launch(launch)
    chat_template = ChatTemplate(template, {})
    hints: tuple[dict[str, Any], ...] = ({}, effort_hints("none"), effort_hints("low"))
    efforts: tuple[object, ...] = ("none", "low", "utmost", 3, ["none"], None)
    options: tuple[dict[str, Any], ...] = ({}, *({"reasoning_effort": effort} for effort in efforts))
    for hint, option in product(hints, options):
        prompt = ChatPrompt(MESSAGES, template_options=option, template_hints=hint)
        expected = output_format.reasoning_format.detect_start(chat_template.render(prompt))
        assert output_format.reasoning_start(prompt) is expected, (hint, option)


def test_output_without_reasoning_is_content(front: Frontend, client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    _, reply = complete(front, client, "Yes.", extra_body=extra)
    assert (reply.choices[0].message.content, reply.choices[0].message.reasoning_content) == ("Yes.", None)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_grammar_applies_after_the_reasoning(
    front: Frontend, client: openai.OpenAI, options: dict[str, bool]
) -> None:
    extra = {"chat_template_kwargs": options, "guided_choice": ["Yes.", "No."]}
    text = "Yes." if options == {"enable_thinking": False} else "<think>hm</think>Yes."
    request, reply = complete(
        front, client, text.removeprefix("<think>") if options else text, extra_body=extra
    )
    assert request.grammar is not None
    assert reply.choices[0].message.content == "Yes."


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "have the same name"),
        ({"tool_choice": "required"}, "'tool_choice' needs 'tools'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the 'tools'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"},
            "must be of type object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
            "'not' of the JSON schema at # is not supported",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "needs 'tool_call_id'"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "is only allowed in messages with the role \"tool\""),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "x")}, "not among the 'tools'"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_invalid_tool_fields_are_refused(front: Frontend, fields: dict[str, Any], says: str) -> None:
    reply = front.post("/v1/chat/completions", **{"model": NAME, "messages": MESSAGES, **fields})
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]


def test_tools_are_refused_by_a_model_without_tool_calls(tmp_path: Path) -> None:
    with running_frontend(write_model(tmp_path), tool_call_parser="auto") as front:
        reply = front.post("/v1/chat/completions", model=NAME, messages=MESSAGES, tools=TOOLS)
        assert reply.status_code == 400
        assert "--tool-call-parser" in reply.json()["error"]["message"]


def test_tools_are_refused_where_the_template_does_not_show_them(tmp_path: Path) -> None:
    with running_frontend(write_model(tmp_path), tool_call_parser="hermes") as front:
        body: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": TOOLS}
        reply = front.post("/v1/chat/completions", **body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "tools" and "does not show tools to the model" in error["message"]
        with ThreadPoolExecutor(1) as pool:
            without = pool.submit(front.post, "/v1/chat/completions", **body, tool_choice="none")
            front.rank.finish(front.rank.request().uid)
            assert without.result().status_code == 200


MISTRAL_CALL = '[TOOL_CALLS] [{"name": "now", "arguments": {"zone": "Köln"}}]'


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """A model whose marker of calls is a special token, with a chat template that is not its own."""
    model = write_model(tmp_path_factory.mktemp("model"))
    tokenizer = (model / "tokenizer.json").read_text().replace("<|system|>", "[TOOL_CALLS]")
    (model / "tokenizer.json").write_text(tokenizer.replace("<|user|>", "[INST]"))
    template = "{% if tools %}{{ tools | tojson }}{% endif %}[INST]{{ messages[-1].content }}{% if 0 %}[TOOL_CALLS]{% endif %}"
    own = model.parent / "template.jinja"
    own.write_text(template)
    with running_frontend(model, chat_template=str(own)) as front:
        assert front.get("/tokenizer_info").json()["chat_template"] == template
        yield front


@pytest.mark.parametrize(
    ("choice", "text"),
    [("auto", f"Hm.[INST] {MISTRAL_CALL}"), ("required", MISTRAL_CALL.removeprefix("[TOOL_CALLS] "))],
)
def test_calls_of_a_model_whose_marker_is_a_special_token(mistral: Frontend, choice: str, text: str) -> None:
    client = openai.OpenAI(base_url=mistral.url + "/v1", api_key="none", max_retries=0)
    request, reply = complete(mistral, client, text, tools=TOOLS, tool_choice=choice)
    message = reply.choices[0].message
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("now", {"zone": "Köln"})
    ]
    assert (message.content or "") == ("Hm." if choice == "auto" else "")
    assert (request.grammar is None) == (choice == "auto")


@pytest.mark.parametrize(
    "fields",
    [{"guided_regex": "a"}, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}],
)
def test_constraints_that_need_special_tokens_are_refused(mistral: Frontend, fields: dict[str, Any]) -> None:
    body = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, **fields}
    reply = mistral.post("/v1/chat/completions", **body)
    assert reply.status_code == 400
    assert "tool_choice" in reply.json()["error"]["message"]


XML_CALL = "<tool_call>\n<function=now>\n<parameter=zone>\nKöln\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def qwen3_coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Frontend]]:
    """A model whose template shows calls of Qwen3-Coder, from which the format is detected."""
    model = write_model(tmp_path_factory.mktemp("model"))
    template = TEMPLATE.replace("<tool_call>{{", "<tool_call><function=x><parameter=zone>{{")
    edit_json(model / "tokenizer_config.json", chat_template=template)
    with running_frontend(model) as front:
        yield model, front


def test_calls_in_xml_are_enforced_and_streamed_as_json(qwen3_coder: tuple[Path, Frontend]) -> None:
    model, front = qwen3_coder
    client = openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    other = "<tool_call>\n<function=nothing>\n</function>\n</tool_call>"
    request, chunks = complete(front, client, XML_CALL, tools=TOOLS, tool_choice="required", stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (calls[0].function.name, len(calls) > 3) == ("now", True)
    assert "".join(call.function.arguments for call in calls) == '{"zone": "Köln"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    texts = (XML_CALL, other, f"{XML_CALL}\n{other}", CALL, XML_CALL.replace("zone", "zona"), "Yes.")
    assert accepted_texts(model, request.grammar, texts) == {XML_CALL, other, f"{XML_CALL}\n{other}"}


ANY_OBJECT: Any = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}


def plan(tool_call_format: ToolCallFormat | None, **fields: Any) -> OutputPlan:
    body = ChatCompletionRequest.model_validate({"model": NAME, "messages": MESSAGES, **fields})
    special_tokens = frozenset((*reasoning_parser.MISTRAL.markers, "<s>"))
    output_format = OutputFormat(
        tool_call_format,
        special_tokens,
        {None: ReasoningStart.OPTIONAL},
        reasoning_parser.MISTRAL,
    )
    return plan_output(body, ChatPrompt(MESSAGES), build_response_grammar(body), output_format)


@pytest.mark.parametrize("tool_call_format", [QWEN3_CODER, PYTHONIC], ids=lambda each: each.name)
def test_tools_that_the_format_cannot_express_are_called_in_json(tool_call_format: ToolCallFormat) -> None:
    own = plan(tool_call_format, tools=TOOLS, tool_choice="required")
    assert own.grammar is not None
    assert "now" in own.grammar.source
    assert '"arguments\\": ' not in own.grammar.source
    as_json = plan(tool_call_format, tools=[ANY_OBJECT], tool_choice="required")
    assert as_json.grammar is not None
    assert '"arguments\\": ' in as_json.grammar.source
    assert as_json.make_parser is not None
    [delta] = as_json.make_parser().push('[{"name": "any", "arguments": {}}]')
    assert isinstance(delta, ToolCallDelta)
    strict = {"type": "function", "function": {**ANY_OBJECT["function"], "strict": True}}
    with pytest.raises(InvalidRequest, match=r"cannot enforce|no marker begins a call"):
        plan(tool_call_format, tools=[strict])


@pytest.mark.parametrize("fields", [{"strict": True}, {}], ids=["strict", "required"])
def test_tool_that_is_larger_than_a_grammar_is_refused_for_its_size(fields: dict[str, Any]) -> None:
    properties = {"a": {"type": "integer", "description": "x" * 600_000}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters, **fields}}
    with pytest.raises(InvalidRequest, match="bytes, more than 524288; use a smaller one"):
        plan(QWEN3_CODER, tools=[tool], **({} if fields else {"tool_choice": "required"}))


def test_reasoning_between_special_tokens_is_divided_from_the_content() -> None:
    planned = plan(None)
    assert planned.keeps_special_tokens
    assert planned.make_parser is not None
    parser = planned.make_parser()
    deltas = [*parser.push("[THINK]hm[/THINK]Yes.<s>"), *parser.finish()]
    assert deltas == [ReasoningDelta("hm"), ContentDelta("Yes.")]
