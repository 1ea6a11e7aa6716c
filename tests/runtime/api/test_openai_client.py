"""OpenAI's client, sync and async, streaming and not, with real frontend processes and an echoing scheduler."""

import asyncio
from collections.abc import Iterator

import pytest
from frontend import NAME, TIMEOUT_SECONDS, Echo, Frontend, running_frontend, write_model
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüße 🙂, the boat!"},
]
ECHO = "Be kind.Grüße 🙂, the boat!"
"""Text of the rendered chat without special tokens, which is the echoed output."""


@pytest.fixture(scope="module", params=[1, 2, 0], ids=lambda n: f"tokenizer_worker_num={n}")
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    with running_frontend(model, tokenizer_worker_num=request.param) as front:
        echo = Echo(front.rank)
        echo.start()
        yield front
        echo.stop()


@pytest.fixture
def client(front: Frontend) -> OpenAI:
    return OpenAI(base_url=front.url + "/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0)


def test_chat_completion(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=NAME, messages=CHAT)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ECHO,
        "length",
    )
    assert reply.model == NAME and reply.id.startswith("chatcmpl-")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == reply.usage.prompt_tokens > 10
    assert reply.usage.total_tokens == 2 * reply.usage.prompt_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_completion_stream(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=NAME, messages=CHAT, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == ECHO
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 8


def test_stream_includes_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=CHAT)
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    *others, last = list(stream)
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in others)


def test_text_completion(client: OpenAI) -> None:
    for prompt in ("The small boat", [302, 267, 338], [[302, 267, 338]]):
        whole = client.completions.create(model=NAME, prompt=prompt)
        stream = client.completions.create(model=NAME, prompt=prompt, stream=True)
        text = whole.choices[0].text
        assert text == ("The small boat" if isinstance(prompt, str) else "The boat")
        assert "".join(chunk.choices[0].text for chunk in stream) == text
        assert whole.choices[0].finish_reason == "length"


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_generate(front: Frontend) -> None:
    reply = front.post("/generate", text="The boat").json()
    ids = reply["token_ids"]
    assert (reply["text"], reply["finish_reason"], ids[0]) == ("The boat", "length", 0)
    assert (
        front.post("/generate", token_ids=ids, skip_special_tokens=False).json()["text"]
        == "<|begin|>The boat"
    )
    events = front.post("/generate", token_ids=ids, stream=True).text.split("\n\n")
    assert len(events) == len(ids) + 3
    assert events[-2:] == ["data: [DONE]", ""]


def test_concurrent_requests_get_their_own_text(front: Frontend) -> None:
    """A hundred requests run at a time."""

    async def check_request(client: AsyncOpenAI, number: int) -> None:
        text = f"pod {number} 🚀" * (1 + number % 5)
        message: ChatCompletionMessageParam = {"role": "user", "content": text}
        if number % 2:
            whole = await client.chat.completions.create(model=NAME, messages=[message])
            assert whole.choices[0].message.content == text
            return
        stream = await client.chat.completions.create(model=NAME, messages=[message], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

    async def check_all() -> None:
        async with AsyncOpenAI(
            base_url=front.url + "/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0
        ) as client:
            await asyncio.gather(*(check_request(client, number) for number in range(100)))

    asyncio.run(check_all())
    assert front.metric("skiff_requests_in_flight") == 0


def test_requests_are_counted_and_health_check_passes(front: Frontend) -> None:
    before = front.metric('skiff_requests_total{endpoint="generate",outcome="finished"}')
    assert front.post("/generate", text="The boat").status_code == 200
    assert front.metric('skiff_requests_total{endpoint="generate",outcome="finished"}') == before + 1
    health = front.get("/health_generate")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
