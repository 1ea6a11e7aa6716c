"""POST /tokenize, /detokenize, /abort and /flush_cache, and health checks, through real frontend processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from frontend import CONTEXT, NAME, TIMEOUT_SECONDS, Echo, Frontend, answer, running_frontend, write_model
from openai import OpenAI
from tiny_tokenizer import BOS, EOS, EOS_ID

from skiff_runtime.messages import AbortRequest, FinishReason, FlushCache, Flushed

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Grüße 🙂"}]
BODY = {"model": NAME, "messages": MESSAGES}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with running_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def tokenize(front: Frontend, **body: object) -> dict[str, Any]:
    response = front.post("/tokenize", **body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    assert (result["count"], result["max_model_len"]) == (len(result["tokens"]), CONTEXT)
    return result


def test_tokenize_text(front: Frontend) -> None:
    text = "Grüße 🙂, the boat!"
    result = tokenize(front, model=NAME, prompt=text)
    assert result["tokens"] == front.rank.tokenizer.encode(text).ids
    assert result["token_strs"] is None
    plain = tokenize(front, prompt=text, add_special_tokens=False, return_token_strs=True)
    assert plain["tokens"] == front.rank.encode(text) == result["tokens"][1:]
    assert len(plain["token_strs"]) == plain["count"]


def test_tokenize_conversation_equals_chat_prompt(front: Frontend, pool: ThreadPoolExecutor) -> None:
    pending = pool.submit(front.post, CHAT, **BODY)
    request = front.rank.request()
    assert tokenize(front, messages=MESSAGES)["tokens"] == front.rank.prompt_ids(request)
    front.rank.finish(request.uid)
    assert pending.result().status_code == 200
    without = tokenize(front, messages=MESSAGES, add_generation_prompt=False)
    assert without["count"] < len(front.rank.prompt_ids(request))


def test_detokenize_restores_text(front: Frontend) -> None:
    text = "Grüße 🙂, the boat!"
    tokens = tokenize(front, prompt=text, add_special_tokens=False)["tokens"]
    assert front.post("/detokenize", model=NAME, tokens=tokens).json() == {"prompt": text}
    assert front.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokenizer_info_is_what_remote_tokenizers_read(front: Frontend) -> None:
    info = front.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["model_max_length"]) == ("PreTrainedTokenizerFast", CONTEXT)
    assert (info["bos_token"], info["eos_token"]) == (BOS, EOS)
    assert "pad_token" not in info and "<|{{ message.role }}|>" in info["chat_template"]
    [token] = tokenize(front, prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert token == EOS_ID


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "belong to 'messages'"),
        ("/tokenize", {"prompt": "x", "tools": []}, 400, "belong to 'messages'"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "the served model is 'tiny'"),
        ("/tokenize", {"prompt": "x", "nonsense": 1}, 400, "unknown field 'nonsense'"),
        ("/tokenize", {"prompt": "x" * (CONTEXT * 300)}, 400, "characters"),
        ("/detokenize", {"tokens": [10**6]}, 400, "1000000"),
        ("/detokenize", {"tokens": ["a"]}, 400, "'tokens[0]'"),
        ("/abort", {}, 400, "either 'request_id' or"),
        ("/abort", {"all": False}, 400, "'all'"),
        ("/abort", {"request_id": "x", "all": True}, 400, "either 'request_id' or"),
    ],
)
def test_invalid_request_is_rejected(
    front: Frontend, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = front.post(path, **body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert response.headers["x-request-id"]


def submit(
    front: Frontend, pool: ThreadPoolExecutor, request_id: str, **body: object
) -> Future[httpx.Response]:
    headers = {"X-Request-Id": request_id}
    return pool.submit(front.http.post, front.url + CHAT, json={**BODY, **body}, headers=headers)


def aborted(front: Frontend) -> AbortRequest:
    message = front.rank.receive()
    assert isinstance(message, AbortRequest)
    assert message.finish is FinishReason.ABORT
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_request_id(front: Frontend, pool: ThreadPoolExecutor, stream: bool) -> None:
    before = front.metric('skiff_aborted_requests_total{reason="endpoint"}')
    mine, others = submit(front, pool, "mine", stream=stream), submit(front, pool, "others")
    requests = [front.rank.request() for _ in range(2)]
    front.rank.start(*requests)
    for request in requests:
        front.rank.generate(request.uid, "boat")
    assert front.post("/abort", request_id="mine").json() == {"aborted": 1}
    ended = aborted(front)
    front.rank.finish(ended.uid, ended.finish)
    assert answer(mine.result()) == ("boat", "abort")
    [left] = [request for request in requests if request.uid != ended.uid]
    front.rank.generate(left.uid, "!", FinishReason.STOP)
    assert others.result().json()["choices"][0]["finish_reason"] == "stop"
    assert front.metric('skiff_aborted_requests_total{reason="endpoint"}') == before + 1
    assert front.post("/abort", request_id="mine").json() == {"aborted": 0}


def test_abort_by_response_id(front: Frontend, pool: ThreadPoolExecutor) -> None:
    client = OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    pending = pool.submit(lambda: client.completions.create(model=NAME, prompt="x", stream=True))
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "boat")
    stream = pending.result()
    first = next(stream)
    assert front.post("/abort", request_id=first.id).json() == {"aborted": 1}
    front.rank.finish(aborted(front).uid)
    assert [str(chunk.choices[0].finish_reason) for chunk in stream][-1] == "abort"


def test_abort_all_ends_every_choice(front: Frontend, pool: ThreadPoolExecutor) -> None:
    waiting = [submit(front, pool, "a", n=2), submit(front, pool, "b")]
    requests = [front.rank.request() for _ in range(3)]
    assert front.post("/abort", all=True).json() == {"aborted": 2}
    uids = {aborted(front).uid for _ in requests}
    assert uids == {request.uid for request in requests}
    for uid in uids:
        front.rank.finish(uid)
    replies = [each.result().json() for each in waiting]
    assert sorted(len(reply["choices"]) for reply in replies) == [1, 2]
    assert front.metric("skiff_requests_in_flight") == 0


def test_flush_cache_returns_freed_pages(front: Frontend, pool: ThreadPoolExecutor) -> None:
    assert flush(front, pool, pages=7, running=2).json() == {"pages": 7, "running": 2}


def flush(front: Frontend, pool: ThreadPoolExecutor, pages: int = 0, running: int = 0) -> httpx.Response:
    """Flush the cache. Asserts that no other message is on its way to the scheduler, because messages keep their order."""
    response = pool.submit(front.http.post, front.url + "/flush_cache")
    message = front.rank.receive()
    assert isinstance(message, FlushCache)
    front.rank.step([], flushed=[Flushed(message.uid, pages=pages, running=running)])
    return response.result()


def test_calls_are_answered_beside_requests(front: Frontend, pool: ThreadPoolExecutor) -> None:
    echo = Echo(front.rank)
    echo.start()
    replies = [submit(front, pool, f"r{number}") for number in range(20)]
    calls = [pool.submit(front.post, "/tokenize", prompt=f"boat {number}") for number in range(20)]
    assert {each.result().status_code for each in (*replies, *calls)} == {200}
    assert front.post("/flush_cache").json()["pages"] == 3
    echo.stop()


def test_concurrent_health_checks_share_one_token(front: Frontend, pool: ThreadPoolExecutor) -> None:
    checks = [open_connection(front) for _ in range(3)]
    for each in checks:
        each.request("GET", "/health_generate")
    request = front.rank.request()
    assert flush(front, pool).status_code == 200
    front.rank.start(request)
    front.rank.generate(request.uid, "b", FinishReason.LENGTH)
    assert [each.getresponse().status for each in checks] == [200] * 3
    assert flush(front, pool).status_code == 200


def open_connection(front: Frontend) -> HTTPConnection:
    """Return a connection that has served a request, so the server reads it before what is sent on another one later."""
    connection = HTTPConnection(front.url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)
    connection.request("GET", "/livez")
    assert connection.getresponse().read()
    return connection
