"""The OpenAPI document: valid, complete, and in agreement with the API."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from frontend import NAME, Frontend, echoing_frontend, write_model
from jsonschema.protocols import Validator

from skiff_runtime import contract
from skiff_runtime.sse import EventDecoder

CHAT, TEXT = contract.PATH_CHAT_COMPLETIONS, contract.PATH_COMPLETIONS
RESPONSES = contract.PATH_RESPONSES
MESSAGES = [{"role": "user", "content": "boat"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "boat"}]}]
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": NAME, "messages": MESSAGES}),
    (CHAT, {"model": NAME, "messages": PARTS, "stop": "x", "temperature": 0, "n": 2}),
    (CHAT, {"model": NAME, "messages": MESSAGES, "stop": ["x", "y"], "max_completion_tokens": 3}),
    (TEXT, {"model": NAME, "prompt": "boat", "max_tokens": 2}),
    (TEXT, {"model": NAME, "prompt": ["boat", "row"], "echo": True}),
    (TEXT, {"model": NAME, "prompt": [5, 6]}),
    (TEXT, {"model": NAME, "prompt": [[5, 6], [7]]}),
    (contract.PATH_MESSAGES, {"model": NAME, "max_tokens": 9, "messages": MESSAGES, "system": "Be kind."}),
    (
        contract.PATH_MESSAGES,
        {"model": NAME, "max_tokens": 9, "messages": PARTS, "thinking": {"type": "adaptive"}},
    ),
    (contract.PATH_COUNT_TOKENS, {"model": NAME, "messages": MESSAGES}),
    (RESPONSES, {"model": NAME, "input": "boat"}),
    (RESPONSES, {"model": NAME, "input": MESSAGES, "instructions": "Row.", "metadata": {"a": "b"}}),
    (
        RESPONSES,
        {"model": NAME, "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ),
    (contract.PATH_GENERATE, {"text": "boat"}),
    (contract.PATH_GENERATE, {"token_ids": [5, 6]}),
    (contract.PATH_EMBEDDINGS, {"model": NAME, "input": "boat"}),
    (contract.PATH_EMBEDDINGS, {"model": NAME, "input": [[5, 6], [7]], "encoding_format": "base64"}),
    (contract.PATH_RERANK, {"query": "boat", "documents": ["row", {"text": "sail"}], "top_n": 1}),
    (contract.PATH_SCORE, {"text_1": "boat", "text_2": ["row", "sail"]}),
    (contract.PATH_SCORE_BARE, {"queries": ["boat"], "documents": ["row"]}),
    (contract.PATH_TOKENIZE, {"prompt": "boat", "return_token_strs": True}),
    (contract.PATH_TOKENIZE, {"messages": MESSAGES}),
    (contract.PATH_DETOKENIZE, {"tokens": [5, 6]}),
    (contract.PATH_ABORT, {"request_id": "x"}),
]
INVALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": NAME, "messages": []}),
    (CHAT, {"model": NAME, "messages": MESSAGES, "temperature": 3}),
    (CHAT, {"model": NAME, "messages": MESSAGES, "stop": [1]}),
    (CHAT, {"model": NAME, "messages": MESSAGES, "nonsense": 1}),
    (CHAT, {"messages": MESSAGES}),
    (RESPONSES, {"model": NAME, "input": 5}),
    (RESPONSES, {"model": NAME, "input": [{"type": "computer_call_output"}]}),
    (RESPONSES, {"model": NAME, "input": "x", "background": True}),
    (TEXT, {"model": NAME, "prompt": {"a": 1}}),
    (contract.PATH_MESSAGES, {"model": NAME, "messages": MESSAGES}),
    (
        contract.PATH_MESSAGES,
        {"model": NAME, "max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]},
    ),
    (contract.PATH_COUNT_TOKENS, {"model": NAME, "messages": MESSAGES, "max_tokens": 9}),
    (contract.PATH_EMBEDDINGS, {"model": NAME, "input": []}),
    (contract.PATH_EMBEDDINGS, {"input": "boat"}),
    (contract.PATH_RERANK, {"query": "boat", "documents": []}),
    (contract.PATH_SCORE, {"text_1": "boat"}),
    (contract.PATH_DETOKENIZE, {"tokens": "x"}),
    (contract.PATH_ABORT, {"all": False}),
    (contract.PATH_ABORT, {"all": None}),
    (contract.PATH_ABORT, {"all": True, "request_id": "x"}),
    (contract.PATH_TOKENIZE, {"prompt": "x", "messages": MESSAGES}),
    (contract.PATH_GENERATE, {"text": None}),
]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with echoing_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


@pytest.fixture(scope="module")
def document(front: Frontend) -> dict[str, Any]:
    found: dict[str, Any] = front.get(contract.PATH_OPENAPI).json()
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def body_validator(document: dict[str, Any], path: str) -> Validator:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return validator(document, content["application/json"]["schema"])


def test_document_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description") or name == "JsonValue", name
    ids = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(set(ids)) == len(ids)
    references = re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(document))
    assert set(references) <= set(document["components"]["schemas"])


def test_every_path_is_documented_and_served(front: Frontend, document: dict[str, Any]) -> None:
    documented = set(document["paths"])
    paths = {name: value for name, value in vars(contract).items() if name.startswith("PATH_")}
    # Those of a fetcher are no part of the API.
    promised = {value for name, value in paths.items() if not name.startswith("PATH_PEER_")}
    assert promised - documented == {contract.PATH_OPENAPI, contract.PATH_DOCS}
    for path, methods in document["paths"].items():
        for method in methods:
            url = front.url + path.replace("{name}", NAME)
            if path == contract.PATH_EVENTS:  # it does not end
                with front.http.stream(method, url) as stream:
                    assert stream.status_code == 200
                continue
            response = front.http.request(method, url, content=b"?")
            is_unstored = (
                response.status_code == 404 and response.json()["error"]["code"] == "response_not_found"
            )
            assert response.status_code not in (404, 405) or is_unstored, (method, path)
            assert str(response.status_code) in methods[method]["responses"]


@pytest.mark.parametrize(("path", "body"), VALID)
def test_valid_body_gets_documented_response(
    front: Frontend, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    body_validator(document, path).validate(body)
    response = front.post(path, **body)
    assert response.status_code == 200, response.text
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    validator(document, content["application/json"]["schema"]).validate(response.json())
    for header in document["paths"][path]["post"]["responses"]["200"]["headers"]:
        assert header in response.headers


@pytest.mark.parametrize(("path", "body"), INVALID)
def test_invalid_body_gets_documented_error(
    front: Frontend, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert list(body_validator(document, path).iter_errors(body))
    response = front.post(path, **body)
    assert response.status_code == 400
    schema = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    validator(document, schema).validate(response.json())


@pytest.mark.parametrize(
    "path",
    [
        contract.PATH_MODELS,
        contract.PATH_SERVER_INFO,
        contract.PATH_VERSION,
        contract.PATH_TOKENIZER_INFO,
        contract.PATH_STARTUPZ,
        "/livez",
        "/health",
    ],
)
def test_get_returns_documented_response(front: Frontend, document: dict[str, Any], path: str) -> None:
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(document, schema).validate(front.get(path).json())


def test_docs_page_shows_document(front: Frontend) -> None:
    response = front.get(contract.PATH_DOCS)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "SwaggerUIBundle" in response.text and f"url: '{contract.PATH_OPENAPI}'" in response.text


def test_operations_are_tagged_by_subject(document: dict[str, Any]) -> None:
    tags = {
        path: tag
        for path, methods in document["paths"].items()
        for each in methods.values()
        for tag in each["tags"]
    }
    assert tags[CHAT] == tags[TEXT] == tags[contract.PATH_GENERATE] == "generation"
    assert tags[contract.PATH_ABORT] == tags[contract.PATH_FLUSH_CACHE] == "administration"
    assert set(tags.values()) == {"generation", "embeddings", "tokens", "administration", "service", "probes"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"model": NAME, "prompt": "boat", "logprobs": 2, "echo": True}),
        (contract.PATH_GENERATE, {"text": "boat", "logprobs": 2, "prompt_logprobs": 2}),
    ],
)
def test_every_event_of_a_stream_is_as_documented(
    front: Frontend, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"text/event-stream", "application/json"}
    item = content["text/event-stream"]["itemSchema"]
    done, json_event = item["properties"]["data"]["anyOf"]
    payload = validator(document, json_event["contentSchema"])
    *events, last = EventDecoder().feed(front.post(path, **body, stream=True).content)
    assert last.decode() == done["const"]
    assert len(events) > 2
    for event in events:
        validator(document, item).validate({"data": event.decode()})
        payload.validate(json.loads(event))
    payload.validate({"error": {"message": "x", "type": "x", "param": None, "code": None}})
    assert list(payload.iter_errors({"id": "x"}))


def test_every_event_of_a_response_is_as_documented(front: Frontend, document: dict[str, Any]) -> None:
    content = document["paths"][RESPONSES]["post"]["responses"]["200"]["content"]
    item = content["text/event-stream"]["itemSchema"]
    payload = validator(document, item["properties"]["data"]["contentSchema"])
    reply = front.post(RESPONSES, model=NAME, input="boat", stream=True, top_logprobs=1)
    events = EventDecoder().feed(reply.content)
    assert len(events) > 8
    for event in events:
        validator(document, item).validate({"data": event.decode()})
        payload.validate(json.loads(event))
    assert list(payload.iter_errors({"type": "x"}))


def test_stored_response_and_its_input_are_as_documented(front: Frontend, document: dict[str, Any]) -> None:
    stored = front.post(RESPONSES, model=NAME, input="boat").json()["id"]
    for suffix in ("", "/input_items"):
        path = RESPONSES + "/{response_id}" + suffix
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        validator(document, schema).validate(front.get(path.replace("{response_id}", stored)).json())


def test_chat_response_and_its_events_have_schemas_of_their_own(document: dict[str, Any]) -> None:
    content = document["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletionResponse"}
    _, json_event = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"]
    assert json_event["contentSchema"]["anyOf"] == [
        {"$ref": "#/components/schemas/ChatCompletionChunk"},
        {"$ref": "#/components/schemas/ErrorResponse"},
    ]


def test_deadline_header_is_documented(document: dict[str, Any]) -> None:
    deadline = next(
        each
        for each in document["paths"][CHAT]["post"]["parameters"]
        if each["name"] == "x-request-timeout-seconds"
    )
    assert (deadline["required"], deadline["schema"]["type"]) == (False, "number")
    assert (deadline["schema"]["exclusiveMinimum"], deadline["schema"]["maximum"]) == (0, 86400)


def test_without_keys_there_is_no_security_scheme(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    assert "403" in document["paths"][CHAT]["post"]["responses"]
