"""Invalid requests get one error each, in OpenAI's shape, and do not disturb another request."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from frontend import CONTEXT, NAME, TIMEOUT_SECONDS, Frontend, running_frontend, write_model
from openai import APIStatusError, OpenAI

from skiff_runtime.messages import FinishReason

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "hi"}
PATHS = (CHAT, "/tokenize")
"""One path past FastAPI, and one through it."""
LIMIT = 100_000


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    with running_frontend(
        model, max_request_bytes=LIMIT, max_running_requests=2, max_queued_requests=1
    ) as front:
        yield front


@pytest.fixture(autouse=True)
def another_request(front: Frontend) -> Iterator[None]:
    """Run another request during the test, and check its response."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, CHAT, **BODY)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "one")
        yield
        front.rank.generate(request.uid, " two", FinishReason.LENGTH)
        assert pending.result().json()["choices"][0]["message"]["content"] == "one two"
    assert front.rank.poll() == []
    assert front.metric("skiff_requests_in_flight") == 0


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert "Traceback" not in found["message"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        (
            CHAT,
            {**BODY, "messages": [{"role": "user", "content": "x " * 600}]},
            400,
            "context_length_exceeded",
            f"holds {CONTEXT} tokens",
        ),
        (CHAT, {**BODY, "max_tokens": CONTEXT}, 400, "context_length_exceeded", f"{CONTEXT} of output"),
        ("/v1/completions", {**TEXT, "prompt": ""}, 200, None, ""),
        ("/v1/completions", {**TEXT, "prompt": []}, 400, None, "prompt is empty"),
        ("/v1/completions", {**TEXT, "prompt": [389]}, 400, None, "token id 389 at position 0"),
        ("/v1/completions", {**TEXT, "max_tokens": -1}, 400, None, "'max_tokens'"),
        (CHAT, {**BODY, "model": "other"}, 404, "model_not_found", "the served model is 'tiny'"),
        (CHAT, {**BODY, "stop_token_ids": [10**6]}, 400, None, "token id 1000000"),
        (CHAT, {**BODY, "nonsense": 1}, 400, "unknown_parameter", "unknown field 'nonsense'"),
        (CHAT, {**BODY, "best_of": 2}, 400, "unsupported_parameter", "'best_of' is not supported: use 1"),
        ("/generate", {"text": "x", "token_ids": [1]}, 400, None, "either 'text' or 'token_ids'"),
    ],
)
def test_invalid_request_is_rejected(
    front: Frontend,
    path: str,
    body: dict[str, Any],
    status: int,
    code: str | None,
    message: str,
    stream: bool,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, path, **{**body, "stream": stream})
        if status == 200:  # an empty text still has a BOS token
            front.rank.finish(front.rank.request().uid)
            assert pending.result().status_code == 200
            return
        found = error(pending.result(), status)
    assert (found["code"], found["type"]) == (code, "invalid_request_error")
    assert message in found["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 10_000, b'{"model": "\\ud800"}', b"model=tiny"])
def test_invalid_json_is_rejected(front: Frontend, raw: bytes, path: str) -> None:
    found = error(front.http.post(front.url + path, content=raw), 400)
    assert found["message"].startswith("the request body is not valid JSON")


@pytest.mark.parametrize("path", PATHS)
def test_json_of_wrong_type_is_rejected(front: Frontend, path: str) -> None:
    for raw, message in ((b"[]", "must be a JSON object"), (b'{"model": NaN}', "'model': Input should be")):
        assert message in error(front.http.post(front.url + path, content=raw), 400)["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json"]
)
def test_content_type_is_ignored(front: Frontend, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = front.http.post(front.url + path, content=b'{"nonsense": 1}', headers=headers)
    assert error(response, 400)["message"].startswith(("'model' is missing", "unknown field 'nonsense'"))


@pytest.mark.parametrize("path", PATHS)
def test_body_with_too_many_values_is_rejected(front: Frontend, path: str) -> None:
    raw = b'{"prompt": [' + b'"",' * 20_000 + b'""]}'
    assert (
        "strings, objects and arrays" in error(front.http.post(front.url + path, content=raw), 413)["message"]
    )


def test_openai_client_raises_status_error(front: Frontend) -> None:
    client = OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], n=129)
    assert (caught.value.status_code, caught.value.body["param"]) == (400, "n")  # type: ignore[index]


def test_unknown_path_and_method_are_rejected(front: Frontend) -> None:
    assert error(front.get("/v2/chat"), 404)["code"] == "not_found"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations"):
        found = error(front.post(path, model=NAME, input="x"), 404)
        assert found["code"] == "not_found"
        assert "generates text only" in found["message"] and CHAT in found["message"]
    response = front.get(CHAT)
    assert error(response, 405)["message"] == f"{CHAT} does not support GET; use POST"
    assert response.headers["allow"] == "POST"
    response = front.post("/livez")
    assert error(response, 405)["message"] == "/livez does not support POST; use GET, HEAD"
    assert response.headers["allow"] == "GET, HEAD"
    assert error(front.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", PATHS)
def test_large_content_length_is_rejected_before_the_body(front: Frontend, path: str) -> None:
    host, _, port = front.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {1 << 40}\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_rejected(front: Frontend, chunked: bool, path: str) -> None:
    data = json.dumps({**BODY, "user": "x" * 4_000_000}).encode()
    content = iter([data[i : i + 65536] for i in range(0, len(data), 65536)]) if chunked else data
    found = error(front.http.post(front.url + path, content=content, timeout=TIMEOUT_SECONDS), 413)
    assert (found["code"], str(LIMIT) in found["message"]) == ("request_too_large", True)


def test_request_beyond_capacity_gets_429(front: Frontend) -> None:
    """Two more requests fill the capacity; the next one gets a Retry-After."""
    rejected = 'skiff_requests_total{endpoint="chat",outcome="rejected"}'
    before = front.metric(rejected)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(front.post, CHAT, **BODY) for _ in range(2)]
        requests = [front.rank.request() for _ in range(2)]
        response = front.post(CHAT, **BODY)
        assert error(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        for request in requests:
            front.rank.finish(request.uid)
        assert [each.result().status_code for each in waiting] == [200, 200]
    assert front.metric(rejected) == before + 1


@pytest.mark.parametrize("path", PATHS)
def test_disconnect_within_a_body_is_harmless(front: Frontend, path: str) -> None:
    host, _, port = front.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{{".encode()
        )
    assert front.get("/readyz").status_code == 200
