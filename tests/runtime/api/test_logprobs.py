"""Log-probabilities and echoed prompts, with real frontend processes; the test acts as the scheduler."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import pytest
from frontend import NAME, TIMEOUT_SECONDS, Frontend, running_frontend, write_model
from openai import OpenAI

from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    TokenLogprobs,
    Wire,
)

CHAT: Any = [{"role": "user", "content": "hi"}]
PROMPT = "The small boat"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with running_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


@pytest.fixture
def client(front: Frontend) -> Iterator[OpenAI]:
    with OpenAI(base_url=front.url + "/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def column(values: Sequence[float], dtype: "np.dtype[Any]") -> bytes:
    return np.array(values, dtype).tobytes()


def send_prompt_logprobs(front: Frontend, request: GenerateRequest, *, pieces: int = 1) -> list[int]:
    """Send the log-probabilities of the prompt like the scheduler: -position, and -0.5 for token 7, the most likely."""
    ids = front.rank.prompt_ids(request)
    bounds = np.linspace(0, len(ids), pieces + 1).astype(int).tolist()
    for start, end in pairwise(bounds):
        positions = range(start, end)
        logprobs = PromptLogprobs(
            uid=request.uid,
            start=start,
            top=1,
            token_ids=column(ids[start:end], Wire.TOKEN),
            logprobs=column([-float(p) if p else nan for p in positions], Wire.LOGPROB),
            top_ids=column([7 if p else NO_TOKEN for p in positions], Wire.TOKEN),
            top_logprobs=column([-0.5 if p else nan for p in positions], Wire.LOGPROB),
        )
        front.rank.step([], prompt_logprobs=[logprobs])
    return ids


def send_output(front: Frontend, request: GenerateRequest, text: str) -> list[int]:
    """Send one token per step, with the log-probabilities -1, -2 and so on, and -0.25 for token 7, the most likely."""
    ids = front.rank.encode(text)
    for number, token in enumerate(ids, start=1):
        logprobs = TokenLogprobs(0, -float(number), column([7], Wire.TOKEN), column([-0.25], Wire.LOGPROB))
        finish = FinishReason.LENGTH if number == len(ids) else FinishReason.RUNNING
        front.rank.step([(request.uid, token, finish)], logprobs=[logprobs])
    return ids


def texts(front: Frontend, ids: Sequence[int]) -> list[str]:
    return [front.rank.tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_cover_every_token_and_byte(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor, stream: bool
) -> None:
    def ask() -> Any:
        options: Any = {"logprobs": True, "top_logprobs": 1, "stream": stream}
        reply = client.chat.completions.create(model=NAME, messages=CHAT, **options)
        return list(reply) if stream else reply

    asked: Future[Any] = pool.submit(ask)
    request = front.rank.request()
    front.rank.start(request)
    ids = send_output(front, request, "Köln 🙂 boat")
    reply = asked.result()
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    found = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert len(found) == len(ids)
    assert b"".join(bytes(each.bytes) for each in found).decode() == "Köln 🙂 boat"
    assert [each.logprob for each in found] == [-float(n) for n in range(1, len(ids) + 1)]
    assert {(top.token, top.logprob) for each in found for top in each.top_logprobs} == {
        (texts(front, [7])[0], -0.25)
    }
    pieces = [each for each in found if max(each.bytes) > 127 and len(each.bytes) == 1]
    assert pieces and all(each.token == f"\\x{each.bytes[0]:02x}" for each in pieces)
    if stream:
        assert all(len(choice.logprobs.content) == 1 for choice in choices if choice.logprobs)
        assert "".join(choice.delta.content or "" for choice in choices) == "Köln 🙂 boat"


def test_chat_logprobs_without_top_logprobs(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    asked = pool.submit(client.chat.completions.create, model=NAME, messages=CHAT, logprobs=True)
    request = front.rank.request()
    front.rank.start(request)
    front.rank.step([(request.uid, 302, FinishReason.LENGTH)], logprobs=[TokenLogprobs(0, -30000.0)])
    logprobs = asked.result().choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(each.logprob, each.top_logprobs) for each in logprobs.content] == [(-9999.0, [])]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_cover_every_token(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor, stream: bool
) -> None:
    def ask() -> Any:
        options: Any = {"logprobs": 1, "stream": stream}
        reply = client.completions.create(model=NAME, prompt=PROMPT, **options)
        return list(reply) if stream else [reply]

    asked: Future[Any] = pool.submit(ask)
    request = front.rank.request()
    front.rank.start(request)
    ids = send_output(front, request, "naïve boat")
    choices = [chunk.choices[0] for chunk in asked.result()]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for each in found for token in each.tokens]
    assert "".join(choice.text for choice in choices) == "naïve boat"
    assert len(tokens) == len(ids) and all(token for token in tokens)
    assert [value for each in found for value in each.token_logprobs] == [
        -float(n + 1) for n in range(len(ids))
    ]
    offsets = [offset for each in found for offset in each.text_offset]
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:\\x") or "naïve boat".startswith(token, offset)
    tops = [top for each in found for top in each.top_logprobs]
    assert [top[token] for token, top in zip(tokens, tops, strict=True)] == [
        -float(n + 1) for n in range(len(ids))
    ]
    assert all(top[texts(front, [7])[0]] == -0.25 and len(top) == 2 for top in tops)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_output(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor, stream: bool, as_ids: bool, pieces: int
) -> None:
    prompt: Any = [0, *front.rank.encode(PROMPT)] if as_ids else PROMPT

    def ask() -> Any:
        options: Any = {"logprobs": 1, "stream": stream, "echo": True}
        reply = client.completions.create(model=NAME, prompt=prompt, **options)
        return list(reply) if stream else [reply]

    asked: Future[Any] = pool.submit(ask)
    request = front.rank.request()
    front.rank.start(request)
    before = send_prompt_logprobs(front, request, pieces=pieces)
    after = send_output(front, request, " sails")
    choices = [chunk.choices[0] for chunk in asked.result()]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    text = "".join(choice.text for choice in choices)
    tokens = [token for each in found for token in each.tokens]
    assert text == ("<|begin|>" if as_ids else "") + PROMPT + " sails"
    assert tokens == texts(front, before + after)
    values = [value for each in found for value in each.token_logprobs]
    assert values == [None] + [-float(n) for n in range(1, len(before))] + [
        -float(n + 1) for n in range(len(after))
    ]
    tops = [top for each in found for top in each.top_logprobs]
    assert tops[0] is None and all(texts(front, [7])[0] in top for top in tops[1:])
    offsets = [offset for each in found for offset in each.text_offset]
    shown = [text.startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True)]
    assert all(shown if as_ids else shown[1:])  # the BOS of a text prompt is not echoed


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [None, 0])
def test_echo_shows_the_prompt_before_the_output(
    front: Frontend, client: OpenAI, pool: ThreadPoolExecutor, stream: bool, as_ids: bool, limit: int | None
) -> None:
    """With ``max_tokens`` 0 the response is the prompt alone."""
    prompt: Any = front.rank.encode(PROMPT) if as_ids else PROMPT

    def ask() -> Any:
        options: Any = {"stream": stream, "echo": True, "max_tokens": limit}
        if stream:
            options["stream_options"] = {"include_usage": True}
        reply = client.completions.create(model=NAME, prompt=prompt, **options)
        return list(reply) if stream else [reply]

    asked: Future[Any] = pool.submit(ask)
    request = front.rank.request()
    assert request.sampling.max_tokens == (16 if limit is None else 1)
    assert request.sampling.prompt_logprobs == (0 if as_ids else None)
    front.rank.start(request)
    if as_ids:
        send_prompt_logprobs(front, request)
    front.rank.generate(request.uid, " sails", FinishReason.STOP if limit == 0 else FinishReason.LENGTH)
    chunks = asked.result()
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert text == PROMPT + ("" if limit == 0 else " sails")
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
    usage = chunks[-1].usage
    assert usage.completion_tokens == (0 if limit == 0 else len(front.rank.encode(" sails")))


@pytest.mark.parametrize("stream", [False, True])
def test_generate_returns_prompt_and_output_logprobs(
    front: Frontend, pool: ThreadPoolExecutor, stream: bool
) -> None:
    asked = pool.submit(front.post, "/generate", text=PROMPT, logprobs=1, prompt_logprobs=1, stream=stream)
    request = front.rank.request()
    front.rank.start(request)
    before = send_prompt_logprobs(front, request)
    after = send_output(front, request, " sails")
    if stream:
        events = [
            json.loads(line[6:]) for line in asked.result().text.splitlines() if line.startswith("data: {")
        ]
    else:
        events = [asked.result().json()]
    prompt = [each for event in events for each in event.get("prompt_logprobs", ())]
    answer = [each for event in events for each in event.get("logprobs", ())]
    assert [each["token_id"] for each in prompt] == before and [each["token_id"] for each in answer] == after
    assert prompt[0] == {"token_id": 0, "logprob": None, "top": []}
    assert prompt[1]["top"] == [[7, -0.5]] and answer[0]["top"] == [[7, -0.25]]
    assert [token for event in events for token in event["token_ids"]] == after
    assert events[-1]["finish_reason"] == "length"
