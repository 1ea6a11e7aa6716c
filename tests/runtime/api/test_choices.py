"""Several choices and several prompts in one request, with real frontend processes; the test acts as the scheduler."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from frontend import NAME, TIMEOUT_SECONDS, Echo, Frontend, running_frontend, write_model
from openai import APIError, OpenAI
from openai.types.chat import ChatCompletion
from service import wait_until

from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, RequestFailed

CHAT = "/v1/chat/completions"
CAPACITY = 8


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    with running_frontend(
        model, tokenizer_worker_num=2, max_running_requests=CAPACITY - 2, max_queued_requests=2
    ) as front:
        yield front


@pytest.fixture(autouse=True)
def nothing_is_left(front: Frontend) -> Iterator[None]:
    yield
    wait_until(lambda: front.metric("skiff_requests_in_flight") == 0)
    assert front.rank.poll() == []


@pytest.fixture
def client(front: Frontend) -> Iterator[OpenAI]:
    with OpenAI(base_url=front.url + "/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def requests(front: Frontend, count: int) -> list[GenerateRequest]:
    found = sorted((front.rank.request() for _ in range(count)), key=lambda request: request.uid)
    assert [request.uid for request in found] == list(range(found[0].uid, found[0].uid + count))
    return found


def ask(client: OpenAI, **options: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], **options
    )
    return answer


def test_choices_of_a_response_are_in_order_and_share_the_prompt(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    """They finish in another order. The prompt counts once, with the cached tokens of the choice that found the fewest."""
    asked = pool.submit(ask, client, n=3, seed=7)
    first, second, third = requests(front, 3)
    assert [each.sampling.seed for each in (first, second, third)] == [7, 8, 9]
    assert first.token_ids == second.token_ids == third.token_ids
    front.rank.start(first, cached=1)
    front.rank.start(second, third, cached=4)
    front.rank.generate(third.uid, "three boats", FinishReason.STOP)
    front.rank.generate(first.uid, "one boat", FinishReason.LENGTH)
    front.rank.generate(second.uid, "two boats", FinishReason.TIMEOUT)
    reply = asked.result()
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    choices = [(choice.message.content, choice.finish_reason) for choice in reply.choices]
    last = front.rank.tokenizer.decode(front.rank.encode("three boats")[:-1])
    assert choices == [("one boat", "length"), ("two boats", "length"), (last, "stop")]
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens == len(first.token_ids) // 4
    texts = ("one boat", "two boats", "three boats")
    assert reply.usage.completion_tokens == sum(len(front.rank.encode(text)) for text in texts)
    assert reply.usage.prompt_tokens_details.cached_tokens == 1


def test_choices_of_a_stream_interleave(front: Frontend, client: OpenAI, pool: ThreadPoolExecutor) -> None:
    asked = pool.submit(lambda: list(ask(client, n=2, stream=True, stream_options={"include_usage": True})))
    first, second = requests(front, 2)
    front.rank.start(first, second)
    for one, two in zip(front.rank.encode("The small boat"), front.rank.encode("A pod starts"), strict=False):
        front.rank.step([(second.uid, two, FinishReason.RUNNING), (first.uid, one, FinishReason.RUNNING)])
    front.rank.finish(second.uid, FinishReason.LENGTH)
    front.rank.generate(first.uid, " sails", FinishReason.LENGTH)
    chunks: Any = asked.result()
    *chunks, last = chunks
    assert last.choices == [] and last.usage is not None
    assert last.usage.prompt_tokens == len(first.token_ids) // 4
    by_choice: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        by_choice[chunk.choices[0].index].append(chunk.choices[0])
    assert [chunk.choices[0].index for chunk in chunks[:4]] == [1, 1, 0, 0]
    for choices in by_choice.values():
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    texts = ["".join(choice.delta.content or "" for choice in by_choice[index]) for index in (0, 1)]
    assert texts[0].startswith("The") and texts[0].endswith(" sails") and texts[1].startswith("A")
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_error_of_one_choice_fails_the_request_and_aborts_the_others(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor, stream: bool
) -> None:
    send: Callable[[], Any] = lambda: list(ask(client, n=3, stream=True)) if stream else ask(client, n=3)  # noqa: E731
    asked: Future[Any] = pool.submit(send)
    first, second, third = requests(front, 3)
    front.rank.start(first, second, third)
    front.rank.generate(first.uid, "one", FinishReason.LENGTH)
    front.rank.generate(second.uid, "boat")
    failure = RequestFailed(uid=second.uid, status=500, kind="internal_server_error", message="broken")
    front.rank.step([], failed=[failure])
    assert front.rank.receive() == AbortRequest(uid=third.uid)
    front.rank.generate(third.uid, "more")
    front.rank.finish(third.uid)
    with pytest.raises(APIError, match="broken"):
        asked.result()


def test_stream_ends_with_a_single_error(front: Frontend, pool: ThreadPoolExecutor) -> None:
    body = {"model": NAME, "prompt": ["a", "b"], "stream": True}
    asked = pool.submit(front.http.post, front.url + "/v1/completions", json=body)
    first, second = requests(front, 2)
    front.rank.start(first, second)
    front.rank.generate(first.uid, "boat")
    front.rank.step([], failed=[RequestFailed(second.uid, 500, "internal_server_error", "broken")])
    assert front.rank.receive() == AbortRequest(uid=first.uid)
    front.rank.finish(first.uid)
    *before, last = [json.loads(line[6:]) for line in asked.result().text.splitlines() if line]
    assert [event["choices"][0]["text"] for event in before] and last["error"]["message"] == "broken"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_every_choice(front: Frontend, stream: bool) -> None:
    body = json.dumps({"model": NAME, "prompt": ["a", "b"], "n": 2, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = front.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as client:
        client.sendall((head + body).encode())
        found = requests(front, 4)
        front.rank.start(*found)
    aborted = [front.rank.receive() for _ in range(4)]
    assert sorted(aborted, key=repr) == sorted((AbortRequest(uid=request.uid) for request in found), key=repr)
    assert front.metric("skiff_requests_in_flight") == 4
    for request in found:
        front.rank.finish(request.uid)


def test_invalid_prompt_fails_the_request(front: Frontend, pool: ThreadPoolExecutor) -> None:
    body = {"model": NAME, "prompt": [[302], [389]], "n": 2}
    asked = pool.submit(front.http.post, front.url + "/v1/completions", json=body)
    messages = [front.rank.receive() for _ in range(5)]
    started = {each.uid for each in messages if isinstance(each, GenerateRequest)}
    aborted = {each.uid for each in messages if isinstance(each, AbortRequest)}
    assert len(started) == 2 and aborted > started  # including the second choice of the invalid prompt
    for uid in started:
        front.rank.finish(uid)
    assert asked.result().status_code == 400
    assert "token id 389" in asked.result().json()["error"]["message"]


def test_prompts_and_choices_are_numbered_prompt_by_prompt(front: Frontend, client: OpenAI) -> None:
    echo = Echo(front.rank)
    echo.start()
    try:
        prompts = ["The small boat", "A pod starts"]
        reply = client.completions.create(model=NAME, prompt=prompts, n=2)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in reply.choices]
        assert texts == ["The small boat"] * 2 + ["A pod starts"] * 2
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 2 * reply.usage.prompt_tokens
        ids = [front.rank.encode(prompt) for prompt in prompts]
        chunks = list(client.completions.create(model=NAME, prompt=ids, n=2, stream=True))
        streamed = [""] * 4
        for chunk in chunks:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == texts
    finally:
        echo.stop()


def test_requests_beyond_the_capacity_are_refused(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
    refused = front.post(CHAT, **body, n=CAPACITY + 1)
    assert refused.status_code == 400 and f"{CAPACITY + 1} choices" in refused.json()["error"]["message"]
    asked = pool.submit(ask, client, n=CAPACITY - 1)
    found = requests(front, CAPACITY - 1)
    assert front.post(CHAT, **body, n=2).status_code == 429
    for request in found:
        front.rank.finish(request.uid, FinishReason.LENGTH)
    assert len(asked.result().choices) == CAPACITY - 1
