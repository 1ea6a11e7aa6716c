"""OpenAI's client on /v1/responses, with real frontend processes, API keys, and the test in place of the scheduler."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from accepted_texts import accepted_texts
from frontend import NAME, Frontend, running_frontend, write_model
from pydantic import BaseModel
from response_events import check_response, check_stream, shape
from tiny_models import edit_json

from skiff_runtime.errors import InternalError
from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, RequestFailed

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.zone }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"type": "string"}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "now", "parameters": SCHEMA, "strict": True}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'
KEYS = ("one", "two")


class Zone(BaseModel):
    zone: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model"))
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    return model


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, api_key=KEYS) as front:
        yield front


@pytest.fixture(scope="module")
def client(front: Frontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url + "/v1", api_key=KEYS[0], max_retries=0)


def serve(front: Frontend, send: Any, text: str, finish: FinishReason = FinishReason.STOP) -> tuple[str, Any]:
    """Return the prompt as the scheduler received it, and what ``send`` returns for an output of ``text``."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(send)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, text)
        front.rank.finish(request.uid, finish)
        return prompt_text(front, request), reply.result()


def prompt_text(front: Frontend, request: GenerateRequest) -> str:
    return str(front.rank.tokenizer.decode(front.rank.prompt_ids(request)))


def post(front: Frontend, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    return front.http.post(front.url + "/v1/responses", json={"model": NAME, **body}, headers=headers)


def test_create_and_stream(front: Frontend, client: openai.OpenAI) -> None:
    prompt, response = serve(
        front, lambda: client.responses.create(model=NAME, input="Hi", instructions="Be kind."), "The boat"
    )
    assert prompt == "<system>Be kind.<user>Hi<assistant>"
    assert (response.output_text, response.status) == ("The boat", "completed")
    assert response.usage is not None and response.usage.output_tokens > 1

    def read() -> Any:
        with client.responses.stream(model=NAME, input="Hi") as stream:
            events = [event.type for event in stream]
            return events, stream.get_final_response()

    _, (events, final) = serve(front, read, "The boat")
    assert final.output_text == "The boat"
    assert events[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1] == "response.completed" and "response.output_text.delta" in events
    assert front.metric('skiff_requests_total{endpoint="responses",outcome="finished"}') >= 2


def test_raw_stream_and_response_are_valid(front: Frontend) -> None:
    text = f"<think>Hm.</think>I look.\n{CALL}\n{CALL}"
    for logprobs in (None, ["message.output_text.logprobs"]):
        body = {"input": "Hi", "tools": TOOLS, "include": logprobs}
        _, reply = serve(front, lambda body=body: post(front, **body, stream=True), text)
        assert reply.headers["content-type"].startswith("text/event-stream")
        last = check_stream(reply.content)[-1]["response"]
        _, reply = serve(front, lambda body=body: post(front, **body), text)
        response = check_response(reply.content)
        assert shape(last["output"]) == shape(response["output"])
        assert [item["type"] for item in response["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert json.loads(response["output"][3]["arguments"]) == {"zone": "Köln"}
        assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < 15


def test_tool_round_trip(front: Frontend, client: openai.OpenAI) -> None:
    """The client sends the items of the answer back as they came, or continues the response by its id."""
    history: list[Any] = [{"role": "user", "content": "What time?"}]

    def create(**options: Any) -> Any:
        return lambda: client.responses.create(model=NAME, tools=TOOLS, **options)

    prompt, first = serve(front, create(input=history), f"<think>Hm.</think>I look.\n{CALL}")
    assert prompt == "now;<user>What time?<assistant>"
    call = first.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "now", {"zone": "Köln"})
    output: dict[str, Any] = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    expected = "now;<user>What time?<assistant><think>Hm.</think>I look.<tool_call>nowKöln</tool_call><tool>noon<assistant>"
    for options in (
        {"input": [*history, *first.output, output]},
        {"input": [*history, *(item.model_dump(exclude_unset=True) for item in first.output), output]},
        {"input": [output], "previous_response_id": first.id},
        {"input": [*history, *({"type": "item_reference", "id": item.id} for item in first.output), output]},
    ):
        prompt, second = serve(front, create(**options), "It is noon.")
        assert prompt == expected
        assert second.output_text == "It is noon."


def test_parse_enforces_the_schema(front: Frontend, client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(lambda: client.responses.parse(model=NAME, input="Hi", text_format=Zone))
        request = front.rank.request()
        assert request.grammar is not None
        front.rank.start(request)
        front.rank.generate(request.uid, '{"zone": "Köln"}')
        front.rank.finish(request.uid, FinishReason.STOP)
        assert reply.result().output_parsed == Zone(zone="Köln")


def test_required_call_is_enforced(front: Frontend, client: openai.OpenAI, model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            lambda: client.responses.create(model=NAME, input="Hi", tools=TOOLS, tool_choice="required")
        )
        request = front.rank.request()
        assert request.grammar is not None
        assert accepted_texts(model, request.grammar, [CALL, "plain text"]) == {CALL}
        front.rank.start(request)
        front.rank.generate(request.uid, CALL)
        front.rank.finish(request.uid, FinishReason.STOP)
        assert [item.type for item in reply.result().output] == ["function_call"]


def test_stored_response_is_shown_listed_and_deleted(front: Frontend, client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    _, response = serve(front, lambda: client.responses.create(model=NAME, input=items), "x")
    assert client.responses.retrieve(response.id) == response
    other = openai.OpenAI(base_url=front.url + "/v1", api_key=KEYS[1], max_retries=0)
    for attempt in (
        lambda: other.responses.retrieve(response.id),
        lambda: other.responses.delete(response.id),
        lambda: other.responses.cancel(response.id),
        lambda: other.responses.input_items.list(response.id),
        lambda: other.responses.create(model=NAME, input="x", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    listed: Any = client.responses.input_items.list(response.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed.data] == ["a", "b"]
    assert [item.content[0].text for item in listed] == ["a", "b", "c"]  # page by page
    newest: Any = client.responses.input_items.list(response.id)
    assert [item.content[0].text for item in newest.data] == ["c", "b", "a"]
    for options in ({"limit": 0}, {"after": "nope"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(response.id, extra_query=options)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        client.responses.retrieve(response.id, stream=True)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_response_that_is_not_to_be_stored_is_forgotten(front: Frontend, client: openai.OpenAI) -> None:
    _, response = serve(front, lambda: client.responses.create(model=NAME, input="Hi", store=False), "x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_failure_ends_the_stream(front: Frontend) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(lambda: post(front, input="Hi", stream=True))
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "The boat")
        front.rank.step([], failed=[RequestFailed.of(request.uid, InternalError("a rank died"))])
        *_, last = check_stream(reply.result().content)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert last["response"]["output"][0]["content"][0]["text"] == "The boat"


def test_failure_before_the_first_token_has_a_status(front: Frontend, client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(lambda: client.responses.create(model=NAME, input="Hi", stream=True))
        request = front.rank.request()
        front.rank.step([], failed=[RequestFailed.of(request.uid, InternalError("a rank died"))])
        with pytest.raises(openai.InternalServerError, match="a rank died"):
            reply.result()


def test_disconnect_aborts_and_stores_nothing(front: Frontend, client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: client.responses.create(model=NAME, input="Hi", stream=True))
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "The boat")
        stream = opened.result()
        response_id = next(event for event in stream if event.type == "response.created").response.id
        stream.close()
    abort = front.rank.receive()
    assert isinstance(abort, AbortRequest) and abort.uid == request.uid
    front.rank.finish(request.uid)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_context_length_is_an_error_of_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="boat " * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_key_is_required(front: Frontend) -> None:
    assert front.post("/v1/responses", model=NAME, input="x").status_code == 401
    assert front.get("/v1/responses/resp_1").status_code == 401
