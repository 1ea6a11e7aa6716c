"""Requests of the Responses API: which fields are served, accepted or refused, and the prompt that they become."""

import json
import time
from typing import Any

import pytest
from marker_parser import MODEL
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from response_events import check_response

from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.response_store import ResponseStore
from skiff_runtime.api.formats.responses import prepare_response
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.auth import Principal
from skiff_runtime.api.parsing import hermes
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.schemas.responses_request import ResponsesRequest
from skiff_runtime.errors import InvalidRequest, RequestError, ResponseNotFound
from skiff_runtime.messages import ChatPrompt, FinishReason, GrammarKind, TextLogprobs, TokenText, Usage
from skiff_runtime.models.config import SamplingDefaults

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": SCHEMA, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch."}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "close"}],
}
SEARCH = {"type": "web_search", "external_web_access": False}
TOOL_MODEL = ServedModel(
    name="m",
    fingerprint="fp_0",
    vocab_size=9,
    max_model_len=64,
    defaults=SamplingDefaults(),
    output_format=OutputFormat(tool_call_format=hermes.HERMES),
)


def prepare(responses: ResponseStore | None = None, /, *, key: bytes = b"", **fields: Any) -> RequestSpec:
    body = json.dumps({"model": "m", "input": "x", **fields}).encode()
    store = ResponseStore() if responses is None else responses
    return prepare_response(body, TOOL_MODEL, Principal(key), store=store)


def prompt(*args: Any, **fields: Any) -> ChatPrompt:
    [found] = prepare(*args, **fields).prompts
    assert isinstance(found, ChatPrompt)
    return found


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    return caught.value


def answer(spec: RequestSpec, text: str) -> dict[str, Any]:
    """Return the response, which is stored, of a request whose output is ``text``."""
    choice: Any = spec.formatter.make_choice_formatter(0)
    choice.format_delta(text, 5, None)
    choice.format_closing(FinishReason.STOP)
    return check_response(spec.formatter.format_full([], Usage(1, 1, 0)))


def test_every_field_of_the_specification_is_declared() -> None:
    declared = {field.alias or name for name, field in ResponsesRequest.model_fields.items()}
    assert set(ResponseCreateParamsBase.__annotations__) | {"stream"} <= declared


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("access_programs", {"cyber": "standard"}, "remove it"),
        ("background", True, "use false"),
        ("background_options", {"a": 1}, "while the client is connected"),
        ("context_management", [{"type": "compaction"}], "shorten the input"),
        ("conversation", "conv_1", "'previous_response_id'"),
        ("image", {"context_compression": "auto"}, "only text"),
        ("max_tokens", 5, "'max_output_tokens'"),
        ("moderation", {"model": "x"}, "nothing is moderated"),
        ("prompt", {"id": "pmpt_1"}, "'instructions'"),
        ("return_token_ids", True, "token ids"),
        ("spaces_between_special_tokens", False, "remove"),
        ("truncation", "auto", '"disabled"'),
        ("reasoning", {"mode": "pro"}, "standard"),
    ],
)
def test_unsupported_field_is_refused_by_name(field: str, value: Any, advice: str) -> None:
    error = refusal(**{field: value})
    assert isinstance(error, InvalidRequest) and error.code == "unsupported_parameter"
    assert error.param is not None and error.param.startswith(field)
    assert advice in error.message


def test_values_that_mean_off_are_accepted() -> None:
    prepare(background=False, context_management=[], conversation=None, truncation="disabled", prompt=None)


@pytest.mark.parametrize(
    "hints",
    [
        {"client_metadata": {"a": "b"}, "max_tool_calls": 3, "prompt_cache_key": "k"},
        {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"},
        {"safety_identifier": "s", "service_tier": "priority", "user": "u", "metadata": {"a": "b"}},
        {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
        {"reasoning": {"summary": "auto", "generate_summary": "auto", "context": "auto"}},
        {"parallel_tool_calls": True, "store": False},
    ],
)
def test_hints_do_not_change_the_request(hints: dict[str, Any]) -> None:
    plain, hinted = prepare(seed=1), prepare(seed=1, **hints)
    assert hinted.prompts == plain.prompts
    assert (hinted.sampling, hinted.text, hinted.grammar) == (plain.sampling, plain.text, plain.grammar)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": 5}, "input", "must be a string or a list of items"),
        ({"input": []}, None, "'input' is empty"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0]", "function_call_output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0]",
            "images, files and audio",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'user'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]", "runs no tools itself"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0]", "runs no tools itself"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.type", "'text'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [NOW, NOW]}, "tools", "unique"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice", "runs no tools itself"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among"),
        ({"stream_options": {}}, None, '"stream": true'),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "use",
        ),
        ({"max_output_token": 5}, "max_output_token", "did you mean 'max_output_tokens'"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        (
            {"text": {"format": {"type": "json_object"}}, "ignore_eos": True},
            "ignore_eos",
            "structured output",
        ),
        ({"model": "other"}, "model", "not served"),
    ],
)
def test_invalid_request_is_refused(fields: dict[str, Any], param: str | None, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param and words in error.message, error.message


def test_parameters_reach_the_scheduler() -> None:
    spec = prepare(
        max_output_tokens=7, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=9, stop="end", priority=2,
        include=["message.output_text.logprobs"], cache_salt="s",
    )  # fmt: skip
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed, sampling.logprobs) == (0.125, 9, 0)
    assert (spec.text.stop, spec.priority, spec.cache_salt) == (("end",), 2, "s")
    assert prepare(top_logprobs=4).sampling.logprobs == 4
    assert prepare(include=[]).sampling.logprobs is None


def test_parameters_of_chat_reach_the_scheduler() -> None:
    spec = prepare(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={"3": 2.0}, min_tokens=2,
        ignore_eos=True, stop_token_ids=[4], include_stop_str_in_output=True, skip_special_tokens=False,
        bad_words=["no"], allowed_token_ids=[4, 5], truncate_prompt_tokens=9, add_special_tokens=True,
    )  # fmt: skip
    sampling = spec.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((3, 2.0),))
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (4,))
    assert spec.text.include_stop_str_in_output and not spec.text.skip_special_tokens
    assert sampling.allowed_token_ids == (4, 5)
    options = spec.prompt_options
    assert (options.bad_words, options.truncate_prompt_tokens) == (("no",), 9) and options.add_special_tokens


def test_parallel_calls_are_allowed_unless_declined() -> None:
    many, one = (
        prepare(tools=[NOW], tool_choice="required", parallel_tool_calls=allowed).grammar
        for allowed in (True, False)
    )
    assert many is not None and one is not None
    assert "star" in many.source and "star" not in one.source


def test_items_become_chat_messages() -> None:
    """Reasoning, text and calls of one turn are one message; leading system messages are one too."""
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "system", "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."}]},
        {"type": "message", "role": "user", "content": "What time?", "id": "msg_1"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_2",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"zone": "X"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "close", "namespace": "agents", "arguments": ""},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "+1"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c4", "name": "now", "arguments": '{"zone": "cut sho'},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Go on."},
    ]  # fmt: skip

    def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert prompt(input=items, instructions="Help.").messages == [
        {"role": "system", "content": "Help.\n\nBe kind.\n\nBe brief."},
        {"role": "user", "content": "What time?"},
        {
            "role": "assistant",
            "reasoning_content": "Look.",
            "content": "I look.",
            "tool_calls": [
                call("c1", "now", {"zone": "X"}),
                call("c2", "agents__close", {}),
                call("c3", "patch", {"input": "+1"}),
            ],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        {"role": "tool", "content": "ok", "tool_call_id": "c3"},
        {
            "role": "assistant",
            "reasoning_content": "Short.",
            "content": "",
            "tool_calls": [call("c4", "now", {"arguments": '{"zone": "cut sho'})],
        },
        {"role": "assistant", "content": "No."},
        {"role": "system", "content": "Go on."},
    ]


def test_time_for_leading_system_messages_is_linear() -> None:
    """4,096 messages would take many seconds if each were appended to the text so far."""
    text = "x" * 2000
    items = [{"role": "developer", "content": text}] * 4095
    started = time.process_time()
    [system, user] = prompt(input=[*items, {"role": "user", "content": "y"}]).messages
    assert time.process_time() - started < 3
    assert (len(system["content"]), user["content"]) == (4095 * 2002 - 2, "y")


def test_tools_are_offered_as_functions() -> None:
    """Web search is accepted and not offered, because no tool is run here."""
    found = prompt(tools=[NOW, SEARCH, PATCH, AGENTS]).tools
    assert found is not None
    assert [tool["function"]["name"] for tool in found] == ["now", "patch", "agents__close"]
    assert found[0]["function"] == {"name": "now", "description": "The time.", "parameters": SCHEMA}
    assert found[1]["function"]["parameters"]["required"] == ["input"]
    response = answer(prepare(tools=[NOW, SEARCH, PATCH, AGENTS]), "x")
    assert [tool["type"] for tool in response["tools"]] == ["function", "custom", "namespace"]


@pytest.mark.parametrize(
    ("choice", "offered", "is_enforced"),
    [
        ("none", None, False),
        ("auto", ["now", "agents__close"], False),
        ("required", ["now", "agents__close"], True),
        ({"type": "function", "name": "now"}, ["now", "agents__close"], True),
        ({"type": "function", "name": "close", "namespace": "agents"}, ["now", "agents__close"], True),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
            ["now"],
            False,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            ["now"],
            True,
        ),
    ],
)
def test_tool_choice_selects_and_enforces(choice: Any, offered: list[str] | None, is_enforced: bool) -> None:
    spec = prepare(tools=[NOW, AGENTS], tool_choice=choice)
    [found] = spec.prompts
    assert isinstance(found, ChatPrompt)
    names = None if found.tools is None else [tool["function"]["name"] for tool in found.tools]
    assert names == offered
    assert (spec.grammar is not None) == is_enforced
    assert answer(spec, "x")["tool_choice"] == choice


def test_text_format_is_enforced() -> None:
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    spec = prepare(text={"format": schema})
    assert spec.grammar is not None and spec.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(spec.grammar.source) == SCHEMA
    assert answer(spec, "{}")["text"]["format"] == schema
    spec = prepare(text={"format": {"type": "json_object"}})
    assert spec.grammar is not None and spec.grammar.kind is GrammarKind.JSON
    assert prepare(text={"format": {"type": "text"}}).grammar is None


def test_effort_and_verbosity_are_variables_of_the_template() -> None:
    found = prompt(reasoning={"effort": "high"}, text={"verbosity": "low"})
    switches = {"enable_thinking": True, "thinking": True}
    assert found.template_hints == {"reasoning_effort": "high", "verbosity": "low", **switches}
    found = prompt(reasoning={"effort": "none"}, chat_template_kwargs={"thinking": True})
    assert found.template_hints == {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    assert found.template_options == {"thinking": True}
    assert not prompt().template_options and not prompt().template_hints


def test_request_is_echoed() -> None:
    fields: dict[str, Any] = {
        "instructions": "Help.",
        "max_output_tokens": 7,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.5,
        "top_logprobs": 2,
        "top_p": 0.25,
        "user": "u",
    }
    response = answer(prepare(**fields, reasoning={"effort": "low"}), "x")
    assert {name: response[name] for name in fields} == fields
    assert response["reasoning"] == {"effort": "low", "summary": None}


def test_conversation_continues_a_stored_response() -> None:
    store = ResponseStore()
    first = answer(prepare(store, input="one", instructions="First."), "two")
    second = answer(prepare(store, input="three", previous_response_id=first["id"]), "four")
    found = prompt(store, input="five", previous_response_id=second["id"], instructions="Now.").messages
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "Now."),
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
        ("assistant", "four"),
        ("user", "five"),
    ]
    assert second["previous_response_id"] == first["id"]


def test_item_is_referred_to_by_its_id() -> None:
    store = ResponseStore()
    [message] = answer(prepare(store), "two")["output"]
    for reference in ({"type": "item_reference", "id": message["id"]}, {"id": message["id"]}):
        found = prompt(store, input=[reference, {"role": "user", "content": "three"}]).messages
        assert found[0] == {"role": "assistant", "content": "two"}
    with pytest.raises(ResponseNotFound, match="send the item itself"):
        prepare(store, input=[reference], key=b"other")


def test_logprobs_are_shown_and_are_no_part_of_the_conversation() -> None:
    store = ResponseStore()
    spec, token = prepare(store, top_logprobs=1), TokenText(5, b"two", -1.0)
    choice: Any = spec.formatter.make_choice_formatter(0)
    choice.format_delta("two", 5, TextLogprobs(0, token, [token]))
    choice.format_closing(FinishReason.STOP)
    response = check_response(spec.formatter.format_full([], Usage(1, 1, 0)))
    [part] = response["output"][0]["content"]
    assert part["logprobs"]
    stored = store.get(response["id"], b"")
    assert json.loads(stored.body)["output"] == response["output"]
    [item] = stored.load_output()
    assert item["content"] == [{**part, "logprobs": []}]
    assert store.load_items([item["id"]], b"") == {item["id"]: item}


def test_response_of_another_key_or_that_was_not_stored_is_not_found() -> None:
    store = ResponseStore()
    mine = answer(prepare(store, key=b"one"), "x")["id"]
    prepare(store, key=b"one", previous_response_id=mine)
    unstored = answer(prepare(store, store=False), "x")["id"]
    for key, response_id in ((b"two", mine), (b"", mine), (b"", unstored), (b"", "resp_never")):
        with pytest.raises(ResponseNotFound) as caught:
            prepare(store, key=key, previous_response_id=response_id)
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")


def test_tools_need_a_format_of_calls() -> None:
    body = json.dumps({"model": "m", "input": "x", "tools": [NOW]}).encode()
    with pytest.raises(InvalidRequest, match="--tool-call-parser"):
        prepare_response(body, MODEL, Principal(), store=ResponseStore())
