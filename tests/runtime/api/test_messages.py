"""Anthropic's client against real frontend processes: prompts, answers, token counts, errors and keys."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest
from accepted_texts import accepted_texts
from anthropic_answers import check_message, check_stream, join_events
from frontend import CONTEXT, NAME, Frontend, running_frontend, write_model
from tiny_models import edit_json

from skiff_runtime.api.formats.chat_completions import build_chat_prompt
from skiff_runtime.api.formats.messages import build_messages_prompt
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.schemas.messages_request import MessagesPromptFields
from skiff_runtime.api.schemas.request_bodies import ChatCompletionRequest
from skiff_runtime.errors import InternalError
from skiff_runtime.messages import NO_TOKEN, AbortRequest, FinishReason, GenerateRequest, RequestFailed

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
KEY = "sk-of-a-client"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.zone }}</tool_call>"
    "{% endfor %}{% endfor %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TOOLS: list[Any] = [
    {"name": "now", "description": "The time.", "input_schema": SCHEMA},
    {"name": "nothing", "input_schema": {"type": "object", "additionalProperties": False}},
]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
USER: list[Any] = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model"))
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    return model


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, api_key=(KEY,), metrics_names="skiff,vllm") as front:
        front.http.headers["x-api-key"] = KEY
        yield front


@pytest.fixture(scope="module")
def client(front: Frontend) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=front.url, api_key=KEY, max_retries=0, _strict_response_validation=True
    )


def send(
    front: Frontend,
    text: str = "Yes.",
    finish: FinishReason = FinishReason.STOP,
    *,
    cached: int = 0,
    **body: Any,
) -> tuple[GenerateRequest, Any]:
    """Return the request as rank 0 received it, and the message, assembled from events if it was streamed."""
    body = {"model": NAME, "max_tokens": 100, "messages": USER, **body}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, PATH, **body)
        request = front.rank.request()
        front.rank.start(request, cached=cached)
        front.rank.generate(request.uid, text)
        front.rank.finish(request.uid, finish)
        response = pending.result()
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        return request, join_events(check_stream(response.content))
    check_message(response.content)
    return request, response.json()


def prompt_text(front: Frontend, request: GenerateRequest) -> str:
    ids = front.rank.prompt_ids(request)
    return str(front.rank.tokenizer.decode(ids, skip_special_tokens=False))


def prompt_of(front: Frontend, **body: Any) -> str:
    return prompt_text(front, send(front, **body)[0])


@pytest.mark.parametrize("stream", [False, True])
def test_answer_has_blocks_stop_reason_and_usage(front: Frontend, stream: bool) -> None:
    text = f"<think>\nhm\n</think>\n\nWait. {CALL}"
    request, message = send(front, text, cached=3, tools=TOOLS, stream=stream)
    thinking, words, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert thinking["signature"]
    assert words == {"type": "text", "text": "Wait."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "now", {"zone": "Köln"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    prompt = len(front.rank.prompt_ids(request))
    assert message["usage"] == {
        "input_tokens": prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": len(front.rank.encode(text)),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_named(front: Frontend, stream: bool) -> None:
    body = {"model": NAME, "max_tokens": 50, "messages": USER, "stop_sequences": ["wind", "boat"]}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, PATH, **body, stream=stream)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "The small boat crosses")
        abort = front.rank.receive()
        content = pending.result().content
    assert isinstance(abort, AbortRequest) and abort.uid == request.uid
    assert request.text.stop == ("wind", "boat")
    front.rank.step([(request.uid, NO_TOKEN, FinishReason.STOP)])
    message = join_events(check_stream(content)) if stream else json.loads(content)
    assert message["content"] == [{"type": "text", "text": "The small "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "boat")


def test_conversation_is_rendered_by_the_chat_template(front: Frontend) -> None:
    prompt = prompt_of(
        front,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        tools=[{**TOOLS[0], "input_examples": [{"zone": "UTC"}], "defer_loading": True}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "c"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "1", "name": "now", "input": {"zone": "Rom"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "12:00"}],
                    },
                    {"type": "tool_result", "tool_use_id": "2", "content": "gone", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    tool, conversation = prompt.split("<system>")
    function = json.loads(tool)["function"]
    assert (function["name"], function["parameters"]) == ("now", SCHEMA)
    assert function["description"] == 'The time.\n\nExamples of the input:\n{"zone": "UTC"}'
    assert conversation == (
        "Be kind.\n\nBe brief.<user>a\n\nb\n\nc<assistant>(hm)Wait.<tool_call>nowRom</tool_call>"
        "<tool>12:00<tool>Error: gone<user>And?<assistant>"
    )


def test_leading_system_messages_belong_to_the_system_prompt(front: Frontend) -> None:
    messages = [{"role": "system", "content": "b"}, *USER]
    assert prompt_of(front, system="a", messages=messages) == "<system>a\n\nb<user>x<assistant>"


def test_answer_continues_the_assistants_last_message(front: Frontend) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    assert prompt_of(front, messages=messages) == "<user>x<assistant>It is"


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [
        (None, ""),
        ({"type": "adaptive"}, "<think>"),
        ({"type": "enabled", "budget_tokens": 1024}, "<think>"),
    ],
)
def test_thinking_sets_the_switch_of_the_template(front: Frontend, thinking: Any, ending: str) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    assert prompt_of(front, **fields) == f"<user>x<assistant>{ending}"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "max"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "none"),
    ],
)
def test_effort_means_the_same_as_on_chat(front: Frontend, fields: dict[str, Any], effort: str) -> None:
    ending = "<think></think>" if effort == "none" else "<think>"
    assert prompt_of(front, **fields) == f"<user>x[{effort}]<assistant>{ending}"
    chat = ChatCompletionRequest.model_validate({"messages": USER, "model": NAME, "reasoning_effort": effort})
    body = MessagesPromptFields.model_validate({"messages": USER, "model": NAME, **fields})
    prompt = build_messages_prompt(body, OutputFormat())
    assert prompt.template_hints == build_chat_prompt(chat).template_hints
    assert not prompt.template_options


def test_thinking_is_omitted_on_request(front: Frontend) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    _, message = send(front, "hm</think>Yes.", thinking=thinking)
    assert [block.get("thinking", block.get("text")) for block in message["content"]] == ["", "Yes."]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, {CALL, OTHER, f"{CALL}\n{OTHER}"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {CALL, OTHER}),
        ({"type": "tool", "name": "now"}, {CALL}),
    ],
)
def test_tool_choice_is_enforced_by_grammar(
    front: Frontend, model: Path, choice: Any, expected: set[str]
) -> None:
    request, message = send(front, CALL, tools=TOOLS, tool_choice=choice, thinking={"type": "disabled"})
    assert message["content"][0]["name"] == "now"
    assert accepted_texts(model, request.grammar, (CALL, OTHER, f"{CALL}\n{OTHER}", "Yes.", "")) == expected


def test_tool_choice_none_offers_no_tools(front: Frontend) -> None:
    request, message = send(front, "a <tool_call> b", tools=TOOLS, tool_choice={"type": "none"})
    assert prompt_text(front, request) == "<user>x<assistant>"
    assert message["content"] == [{"type": "text", "text": "a <tool_call> b"}]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_output_format_is_enforced_by_grammar(front: Frontend, model: Path, field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields: dict[str, Any] = {field: {"format": form} if field == "output_config" else form}
    text = '{"zone": "Rom"}'
    request, _ = send(front, text, thinking={"type": "disabled"}, **fields)
    assert accepted_texts(model, request.grammar, (text, "{}", "Yes.")) == {text}


def test_sampling_parameters_reach_the_scheduler(front: Frontend) -> None:
    request, _ = send(
        front,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=3,
        priority=2,
        cache_salt="s",
        chat_template_kwargs={"reasoning_effort": "none"},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens, sampling.fits_context) == (
        0.125,
        3,
        100,
        True,
    )
    assert request.priority == 2 and request.cache_salt
    assert prompt_text(front, request) == "<user>x[none]<assistant>"


def test_max_tokens_beyond_the_context_is_lowered_to_it(front: Frontend) -> None:
    request, message = send(front, "Yes.", FinishReason.LENGTH, max_tokens=50 * CONTEXT)
    assert request.sampling.max_tokens == 50 * CONTEXT  # the scheduler lowers it
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_hints_are_accepted(front: Frontend) -> None:
    hints: dict[str, Any] = {
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "metadata": {"user_id": "u"},
        "output_config": {"task_budget": {"type": "tokens", "total": 20_000}},
        "service_tier": "standard_only",
        "speed": "fast",
        "user_profile_id": "u",
        "workspace_id": "w",
        "container": None,
        "mcp_servers": [],
    }
    assert prompt_of(front, **hints) == "<user>x<assistant>"


def test_count_is_the_number_of_input_tokens(front: Frontend, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "system": "Be kind.",
        "tools": TOOLS,
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [*USER, {"role": "assistant", "content": "y"}, {"role": "user", "content": "Grüße 🙂"}],
    }
    count = client.messages.count_tokens(**fields).input_tokens
    assert count == client.beta.messages.count_tokens(**fields).input_tokens
    request, message = send(front, cached=5, **fields)
    usage = message["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count == len(front.rank.prompt_ids(request))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "connect to MCP servers in the client"),
        ({"container": "c"}, "no code is executed"),
        ({"fallbacks": [{"model": "x"}]}, "one model is served"),
        ({"fallback_credit_token": "x"}, "remove it"),
        ({"thread": {"type": "create"}}, "send the whole conversation"),
        ({"billing_policy": {"type": "x"}}, "nothing is billed"),
        ({"compaction": {"type": "x"}}, "shorten the conversation in the client"),
        ({"inference_geo": "eu"}, "where it was deployed"),
        ({"system": 5}, "must be a string or a list of text blocks"),
        ({"thinking": {"type": "much"}}, "'enabled', 'adaptive'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "describe the image"),
        ({"messages": [{"role": "user", "content": [{"type": "mcp_tool_result"}]}]}, "Anthropic's servers"),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "'tool_result'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "no 'tool_use' blocks"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "no 'tool_result' blocks"),
        ({"messages": [{"role": "system", "content": "x"}]}, "needs a message with the role \"user\""),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "ends without text"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "ends without text",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "needs content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run it in the client"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "have the same name"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20250825"]}]}, "must contain \"direct\""),
        ({"tool_choice": {"type": "any"}}, "needs 'tools'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "not among the 'tools'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "output_format": {"type": "json_schema", "schema": {}}},
            "send only the latter",
        ),
    ],
)  # fmt: skip
def test_invalid_request_says_what_to_change(front: Frontend, fields: dict[str, Any], says: str) -> None:
    response = front.post(PATH, **{"model": NAME, "max_tokens": 5, "messages": USER, **fields})
    error = response.json()
    assert (response.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_refusal_of_a_thread_lets_the_tool_runner_go_on_without_one(front: Frontend) -> None:
    response = front.post(PATH, model=NAME, max_tokens=5, messages=USER, thread={"type": "create"})
    details = response.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other = front.post(PATH, model=NAME, max_tokens=5, messages=USER, container="c")
    assert "details" not in other.json()["error"]


def test_errors_reach_the_client_as_its_own_exceptions(front: Frontend, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the served model is 'tiny'"):
        client.messages.create(model="claude-x", max_tokens=5, messages=USER)
    with pytest.raises(anthropic.NotFoundError, match="the served model is 'tiny'"):
        client.messages.count_tokens(model="claude-x", messages=USER)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=NAME, max_tokens=0, messages=USER)
    assert caught.value.request_id
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="sk-wrong").messages.create(model=NAME, max_tokens=5, messages=USER)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_failure_has_anthropics_shape(front: Frontend, stream: bool) -> None:
    body = {"model": NAME, "max_tokens": 5, "messages": USER, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, PATH, **body)
        request = front.rank.request()
        front.rank.start(request)
        if stream:
            front.rank.generate(request.uid, "The boat")
        front.rank.step([], failed=[RequestFailed.of(request.uid, InternalError("it broke"))])
        response = pending.result()
    if stream:
        assert response.text.split("\n\n")[-2].startswith('event: error\ndata: {"type":"error"')
        assert '"api_error","message":"it broke"' in response.text
    else:
        assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


def test_each_header_authenticates(front: Frontend) -> None:
    for headers in ({"x-api-key": KEY}, {"x-api-key": "", "authorization": f"Bearer {KEY}"}):
        response = front.http.post(front.url + COUNT, json={"model": NAME, "messages": USER}, headers=headers)
        assert response.status_code == 200, headers
    for headers in ({"x-api-key": "x"}, {"x-api-key": ""}, {"authorization": "Bearer x", "x-api-key": KEY}):
        response = front.http.post(front.url + COUNT, json={}, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


def test_requests_are_counted_by_endpoint_and_under_vllms_names(front: Frontend) -> None:
    labels = f'{{engine="0",finished_reason="stop",model_name="{NAME}"}}'
    name = f"vllm:request_success_total{labels}"
    before = front.metric('skiff_requests_total{endpoint="messages",outcome="finished"}'), front.metric(name)
    send(front)
    after = front.metric('skiff_requests_total{endpoint="messages",outcome="finished"}'), front.metric(name)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
