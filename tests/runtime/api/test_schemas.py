"""Request bodies: accepted values, and an error of one sentence for the others."""

import json
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from skiff_runtime.api.schemas.field_support import Support, support_of
from skiff_runtime.api.schemas.messages_request import MessagesRequest
from skiff_runtime.api.schemas.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    StrictModel,
)
from skiff_runtime.api.schemas.responses_request import LOGPROBS_INCLUDE, ResponsesRequest
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.errors import InvalidRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def accept(kind: type[StrictModel], body: dict[str, Any]) -> Any:
    return parse_body(kind, json.dumps(body).encode())


def refuse(kind: type[StrictModel], raw: bytes, *, strict: bool = False) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, raw, strict=strict)
    assert caught.value.status == 400
    message = caught.value.message
    assert len(message) < 400
    assert "pydantic" not in message and "Traceback" not in message
    return caught.value


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatCompletionRequest, chat.CompletionCreateParamsStreaming),
        (CompletionRequest, completions.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_client_is_declared(kind: type[StrictModel], params: Any) -> None:
    names = set(params.__annotations__)
    for base in params.__orig_bases__:
        names |= set(getattr(base, "__annotations__", {}))
    assert len(names) > 15
    assert names - set(kind.model_fields) == set()


REFUSED: dict[type[StrictModel], dict[str, Any]] = {
    ChatCompletionRequest: {
        "audio": {"voice": "x", "format": "wav"},
        "best_of": 2,
        "chat_template": "{{ messages }}",
        "documents": [{"text": "x"}],
        "echo": True,
        "function_call": "auto",
        "functions": [{"name": "f"}],
        "guided_whitespace_pattern": " ?",
        "kv_transfer_params": {"a": 1},
        "logits_processors": ["x"],
        "mm_processor_kwargs": {"a": 1},
        "modalities": ["text", "audio"],
        "moderation": {"model": "x"},
        "return_tokens_as_token_ids": True,
        "separate_reasoning": False,
        "spaces_between_special_tokens": False,
        "stream_reasoning": False,
        "use_beam_search": True,
        "vllm_xargs": {"a": 1},
        "web_search_options": {},
    },
    CompletionRequest: {"suffix": "x"},
    GenerateBody: {
        "image_data": "x",
        "logprob_start_len": 0,
        "return_hidden_states": True,
        "return_text_in_logprobs": True,
    },
}
HINTS: dict[type[StrictModel], dict[str, list[Any]]] = {
    ChatCompletionRequest: {
        "guided_decoding_backend": ["xgrammar"],
        "length_penalty": [0.5],
        "metadata": [{"k" * 64: "v" * 512}, {str(n): "" for n in range(16)}],
        "prediction": [{"type": "content", "content": "x"}],
        "prompt_cache_key": ["x" * 512],
        "prompt_cache_options": [{"mode": "explicit", "ttl": "30m"}],
        "prompt_cache_retention": ["in_memory", "24h"],
        "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
        "request_id": ["x"],
        "rid": ["x"],
        "safety_identifier": ["x"],
        "service_tier": ["flex", "scale", "priority", "fast"],
        "store": [True],
        "verbosity": ["low", "high"],
    },
    CompletionRequest: {},
    GenerateBody: {"guided_decoding_backend": ["xgrammar"], "rid": ["x"]},
}
BODIES: dict[type[StrictModel], dict[str, Any]] = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: TEXT,
    GenerateBody: {"text": "hi"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_field_that_is_not_served_is_tested(kind: type[StrictModel]) -> None:
    """The tables above are complete, so each field that is declared as a hint or as refused behaves as one."""
    by_support: dict[Support, set[str]] = {support: set() for support in Support}
    for name, field in kind.model_fields.items():
        by_support[support_of(field)].add(name)
    hints, refused = HINTS[kind], REFUSED[kind]
    shared = set(ChatCompletionRequest.model_fields)
    assert by_support[Support.HINT] - set(hints) <= (shared & set(HINTS[ChatCompletionRequest]))
    assert by_support[Support.REFUSED] - set(refused) <= (shared & set(REFUSED[ChatCompletionRequest]))
    assert set(hints) <= by_support[Support.HINT] and set(refused) <= by_support[Support.REFUSED]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, name, value) for kind in HINTS for name, values in HINTS[kind].items() for value in values],
)
def test_hints_are_accepted_and_refused_by_name_with_strict(
    kind: type[StrictModel], field: str, value: Any
) -> None:
    body = {**BODIES[kind], field: value}
    assert getattr(accept(kind, body), field) == value
    error = refuse(kind, json.dumps(body).encode(), strict=True)
    assert error.message.startswith(f"'{field}' is not supported with --strict: ")
    assert (error.code, error.param) == ("unsupported_parameter", field)
    parse_body(kind, json.dumps({**BODIES[kind], field: None}).encode(), strict=True)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, name, value) for kind in REFUSED for name, value in REFUSED[kind].items()],
)
def test_unsupported_fields_are_refused_by_name(kind: type[StrictModel], field: str, value: object) -> None:
    error = refuse(kind, json.dumps({**BODIES[kind], field: value}).encode())
    assert error.message.startswith(f"'{field}' is not supported: ")
    assert (error.code, error.param) == ("unsupported_parameter", field)
    accept(kind, {**BODIES[kind], field: None})


TEXT_PART: dict[str, Any] = {"type": "output_text", "text": "x"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": [TEXT_PART]}
RESPONSES_FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
CLAUDE_TOOL: dict[str, Any] = {"name": "f", "input_schema": {}}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ResponsesRequest, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (ResponsesRequest, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (ResponsesRequest, {"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        (ResponsesRequest, {"reasoning": {"context": "auto"}}, "reasoning.context"),
        (ResponsesRequest, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (ResponsesRequest, {"include": [LOGPROBS_INCLUDE, "reasoning.encrypted_content"]}, "include[1]"),
        (
            ResponsesRequest,
            {"tools": [{**RESPONSES_FUNCTION, "defer_loading": True}]},
            "tools[0].defer_loading",
        ),
        (ResponsesRequest, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (ResponsesRequest, {"input": [{**ANSWER, "phase": "commentary"}]}, "input[0].phase"),
        (
            ResponsesRequest,
            {"input": [{**ANSWER, "content": [{**TEXT_PART, "annotations": [{"type": "x"}]}]}]},
            "input[0].content[0].annotations",
        ),
        (MessagesRequest, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}]},
            "messages[0].content[0].citations",
        ),
        (MessagesRequest, {"tools": [{**CLAUDE_TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        (
            MessagesRequest,
            {"tools": [{**CLAUDE_TOOL, "eager_input_streaming": True}]},
            "tools[0].eager_input_streaming",
        ),
    ],
)
def test_strict_refuses_hints_within_fields(
    kind: type[StrictModel], fields: dict[str, Any], param: str
) -> None:
    base = {"input": "x"} if kind is ResponsesRequest else {"messages": CHAT["messages"], "max_tokens": 5}
    body = {"model": "m", **base, **fields}
    accept(kind, body)
    error = refuse(kind, json.dumps(body).encode(), strict=True)
    assert (error.code, error.param) == ("unsupported_parameter", param)


def test_strict_accepts_an_answer_that_is_sent_back() -> None:
    part = {**TEXT_PART, "annotations": [], "logprobs": []}
    reasoning: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    body = {"model": "m", "input": [reasoning, {**ANSWER, "content": [part]}], "include": [LOGPROBS_INCLUDE]}
    parse_body(ResponsesRequest, json.dumps(body).encode(), strict=True)


def test_limits_of_hints_are_those_of_openai() -> None:
    for metadata in ({"k" * 65: ""}, {"k": "v" * 513}, {str(n): "" for n in range(17)}, {"k": 1}):
        assert refuse(ChatCompletionRequest, json.dumps({**CHAT, "metadata": metadata}).encode()).param
    for field, value in (
        ("service_tier", "fastest"),
        ("reasoning_effort", "much"),
        ("prompt_cache_key", "x" * 513),
    ):
        error = refuse(ChatCompletionRequest, json.dumps({**CHAT, field: value}).encode())
        assert error.param == field and "not supported" not in error.message


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        ({"role": "user", "content": "x", "name": "bob"}, {"name": "bob"}),
        ({"role": "system", "content": "x", "name": "bob"}, {"name": "bob"}),
        ({"role": "tool", "content": "x", "tool_call_id": "c", "name": "f"}, {"name": "f"}),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, {}),
        ({**ASSISTANT, "provider_specific_fields": {"refusal": None}}, {}),
        ({**ASSISTANT, "annotations": [{"type": "url_citation"}]}, {}),
        ({**ASSISTANT, "parsed": {"answer": 4}}, {}),
        (
            {**ASSISTANT, "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]},
            {},
        ),
        ({**ASSISTANT, "reasoning": "hm"}, {"reasoning_content": "hm"}),
        ({**ASSISTANT, "content": None}, {"content": ""}),
        ({**ASSISTANT, "content": None, "refusal": "No."}, {"content": "No."}),
        ({**ASSISTANT, "tool_calls": [{**CALL, "index": 0}]}, {}),
        ({**ASSISTANT, "tool_calls": [{**CALL, "provider_specific_fields": {"a": 1}}]}, {}),
        (
            {**ASSISTANT, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"zo'}}]},
            {
                "tool_calls": [
                    {**CALL, "function": {"name": "f", "arguments": {"arguments": '{"zo'}}},
                ]
            },
        ),
    ],
)  # fmt: skip
def test_hints_in_messages_are_accepted_and_refused_with_strict(
    message: dict[str, Any], rendered: dict[str, Any]
) -> None:
    body = {**CHAT, "messages": [message]}
    shown = accept(ChatCompletionRequest, body).messages[0].to_template()
    assert {name: shown[name] for name in rendered} == rendered
    error = refuse(ChatCompletionRequest, json.dumps(body).encode(), strict=True)
    assert error.param is not None and error.param.startswith("messages[0]")


@pytest.mark.parametrize(
    "extra",
    [
        {
            "n": 1,
            "best_of": 1,
            "logprobs": False,
            "top_logprobs": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
        },
        {"tools": None, "tool_choice": "none", "logit_bias": {}, "functions": []},
        {"tools": [], "response_format": {"type": "text"}, "service_tier": "auto", "modalities": ["text"]},
        {"stop": None, "seed": None, "temperature": None, "top_p": None, "stream": None, "max_tokens": None},
        {"stop": "x", "seed": -(2**63), "temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0},
        {"max_tokens": 7, "max_completion_tokens": 7, "stop_token_ids": [5], "ignore_eos": True, "user": "u"},
    ],
)
def test_values_that_mean_the_default_are_accepted(extra: dict[str, Any]) -> None:
    accept(ChatCompletionRequest, {**CHAT, **extra})


def test_message_of_an_earlier_response_is_accepted() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = accept(
        ChatCompletionRequest, {**CHAT, "messages": [answer, {"role": "developer", "content": parts}]}
    )
    assert [part.text for part in body.messages[1].content or ()] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2, not 2.1"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0, not 0"),
        ({"min_p": -0.1}, "min_p", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": 10**12}, "max_tokens", "less than or equal to"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "send only the latter"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ""}, "stop[0]", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ["a" * 257]}, "stop[0]", "at most 256 characters"),
        ({"stop": 5}, "stop", "must be a string or a list"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"repetition_penalty": 2.1}, "repetition_penalty", "less than or equal to 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"5": True}}, "logit_bias.5", "valid number"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024 items"),
        ({"top_logprobs": 2}, None, 'needs "logprobs": true'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 5}, "logprobs", "valid boolean"),
        ({"min_tokens": 6, "max_tokens": 5}, None, "limited to 5 tokens"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, None, "limited to 5 tokens"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"priority": 1001}, "priority", "less than or equal to 1000"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None, "send only one of"),
        ({"chat_template_kwargs": {str(n): 1 for n in range(65)}}, "chat_template_kwargs", "at most 64"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "should be an object"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, 'needs "stream": true'),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        (
            {"temprature": 1},
            "temprature",
            "unknown field 'temprature'; remove it, or did you mean 'temperature'?",
        ),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"messages": [5]}, "messages[0]", "object"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            "'system', 'developer', 'user'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs 'content'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0]",
            "needs 'content', a string or a list",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "should be 'text'",
        ),
        (
            {"messages": [{**ASSISTANT, "audio": {"id": "x"}}]},
            "messages[0].audio",
            "not supported: remove it",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0]", "needs 'content'"),
        ({"messages": [{**ASSISTANT, "reasoning": "a", "reasoning_content": "b"}]}, "messages[0]", "differ"),
        (
            {"messages": [{"role": "user", "content": "x", "refusal": "no"}]},
            "messages[0]",
            "'refusal' is only",
        ),
        ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
        ({"bad_words": ["x"] * 129}, "bad_words", "at most 128 items"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"truncate_prompt_tokens": 0}, None, "must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"model": None}, "model", "valid string"),
    ],
)
def test_invalid_chat_field_is_named_in_one_sentence(
    changes: dict[str, Any], param: str | None, says: str
) -> None:
    error = refuse(ChatCompletionRequest, json.dumps({**CHAT, **changes}).encode())
    assert (error.param, says in error.message) == (param, True), error.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        json.dumps({f"k{n}": n for n in range(10_000)}).encode(),
        json.dumps({**CHAT, "messages": [1] * 10_000}).encode(),
    ],
)
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    refuse(ChatCompletionRequest, raw)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (["x", "y"], ["x", "y"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["x", [7]], ["x", [7]]),
        ("", [""]),
        ([], [[]]),
    ],
)
def test_prompt_forms_are_normalized_to_a_list(prompt: object, expected: object) -> None:
    assert accept(CompletionRequest, {"model": "m", "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"prompt": ["x"] * 1025}, "prompt", "at most 1024 items"),
        ({"prompt": ["x"] * 513, "n": 2}, None, "request 1026 choices; a request may have at most 1024"),
        ({"prompt": ["x", 5]}, "prompt[1]", "valid string"),
        ({"prompt": [1, -5]}, "prompt[0][1]", "greater than or equal to 0, not -5"),
        ({"prompt": [1, "x"]}, "prompt[0][1]", "valid integer"),
        ({"prompt": 5}, "prompt", "must be a string, a list of token ids, or a list of those"),
        ({"prompt": ...}, "prompt", "is missing"),
        ({"best_of": 3}, "best_of", "not supported: use 1"),
        ({"echo": 1}, "echo", "valid boolean"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"max_tokens": 0}, None, 'needs "echo": true'),
        ({"min_tokens": 17}, None, "limited to 16 tokens"),
        ({"suffix": "end"}, "suffix", "not supported: remove it"),
    ],
)
def test_invalid_completion_field_is_named_in_one_sentence(
    changes: dict[str, Any], param: str | None, says: str
) -> None:
    body = {key: value for key, value in {**TEXT, **changes}.items() if value is not ...}
    error = refuse(CompletionRequest, json.dumps(body).encode())
    assert (error.param, says in error.message) == (param, True), error.message


@pytest.mark.parametrize(
    "body", [{}, {"text": "x", "token_ids": [1]}, {"text": "x", "input_ids": [1]}, {"text": None}]
)
def test_generate_takes_either_text_or_token_ids(body: dict[str, Any]) -> None:
    assert "either 'text' or 'token_ids'" in refuse(GenerateBody, json.dumps(body).encode()).message
