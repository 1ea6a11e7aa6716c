"""One request step by step through real frontend processes, with the test in place of the scheduler."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from frontend import NAME, TIMEOUT_SECONDS, Frontend, running_frontend, write_model

from skiff_runtime.messages import NO_TOKEN, AbortRequest, FinishReason, RequestFailed

BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with running_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


@pytest.fixture(autouse=True)
def no_request_is_left(front: Frontend) -> Iterator[None]:
    yield
    wait_until_idle(front)
    assert front.rank.poll() == []


def wait_until_idle(front: Frontend) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while front.metric("skiff_requests_in_flight"):
        assert time.monotonic() < deadline, "a request never ended"
        time.sleep(0.01)


@pytest.fixture
def send_chat(front: Frontend) -> Iterator[Callable[..., "Future[httpx.Response]"]]:
    """Return a function that sends a chat request from a thread."""
    with ThreadPoolExecutor(4) as pool:
        yield lambda **body: pool.submit(front.post, CHAT, **{**BODY, **body})


SendChat = Callable[..., "Future[httpx.Response]"]


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]) for block in blocks]


def raw_request(front: Frontend, stream: bool, pause: bool = False) -> socket.socket:
    """Return a connection that has sent a chat request. ``pause``: with the smallest receive buffer."""
    host, _, port = front.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    if pause:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(TIMEOUT_SECONDS)
    connection.connect((host, int(port)))
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_tokens_are_streamed_as_they_are_generated(front: Frontend) -> None:
    """The client reads the first word before the second one is generated."""
    with httpx.Client(base_url=front.url, timeout=TIMEOUT_SECONDS) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            client.send, client.build_request("POST", CHAT, json={**BODY, "stream": True}), stream=True
        )
        request = front.rank.request()
        front.rank.start(request, cached=1)
        front.rank.generate(request.uid, "boat")
        response = waiting.result()
        pieces = response.iter_text()
        seen = ""
        while seen.count('"content":') < 1 + len(front.rank.encode("boat")):
            seen += next(pieces)
        front.rank.generate(request.uid, " pod", FinishReason.LENGTH)
        assert "[DONE]" not in seen
        assert "".join(pieces).count('"content":') == len(front.rank.encode(" pod"))


def test_stop_string_spans_tokens(front: Frontend, send_chat: SendChat) -> None:
    for stream in (False, True):
        pending = send_chat(stop=["##"], stream=stream, seed=5, temperature=0, max_tokens=50)
        request = front.rank.request()
        assert (request.sampling.seed, request.sampling.temperature, request.sampling.max_tokens) == (
            5,
            0.0,
            50,
        )
        front.rank.start(request)
        front.rank.generate(request.uid, "one #")
        front.rank.generate(request.uid, "# two")
        assert front.rank.receive() == AbortRequest(uid=request.uid, finish=FinishReason.STOP)
        front.rank.finish(request.uid, FinishReason.STOP)
        if stream:
            *_, last, done = events(pending.result())
            assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
            shown = "".join(
                e["choices"][0]["delta"].get("content", "") for e in events(pending.result())[:-1]
            )
        else:
            reply = pending.result().json()
            assert reply["choices"][0]["finish_reason"] == "stop"
            shown = reply["choices"][0]["message"]["content"]
        assert shown == "one "


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length"), (FinishReason.ABORT, "abort")],
)
def test_finish_reason_is_returned(
    front: Frontend, send_chat: SendChat, finish: FinishReason, reason: str
) -> None:
    pending = send_chat()
    request = front.rank.request()
    front.rank.start(request)
    front.rank.finish(request.uid, finish)
    assert pending.result().json()["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_first_token_has_its_own_status(
    front: Frontend, send_chat: SendChat, stream: bool
) -> None:
    pending = send_chat(stream=stream)
    request = front.rank.request()
    failure = RequestFailed(
        uid=request.uid,
        status=400,
        kind="invalid_request_error",
        message="does not fit",
        code="c",
        param="messages",
    )
    front.rank.step([], failed=[failure])
    response = pending.result()
    assert response.status_code == 400
    assert response.json() == {
        "error": {
            "message": "does not fit",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "c",
        }
    }


def test_error_after_first_token_ends_the_stream(front: Frontend, send_chat: SendChat) -> None:
    pending = send_chat(stream=True)
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "boat")
    failure = RequestFailed(uid=request.uid, status=500, kind="internal_server_error", message="broken")
    front.rank.step([], failed=[failure])
    response = pending.result()
    assert response.status_code == 200
    assert events(response)[-1]["error"]["message"] == "broken"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_disconnect_aborts_the_request(front: Frontend, stream: bool, running: bool) -> None:
    connection = raw_request(front, stream)
    request = front.rank.request()
    if running:
        front.rank.start(request)
        front.rank.generate(request.uid, "boat")
        if stream:
            assert b"200 OK" in connection.recv(1000)
    connection.close()
    assert front.rank.receive() == AbortRequest(uid=request.uid, finish=FinishReason.ABORT)
    assert front.metric("skiff_requests_in_flight") == 1
    front.rank.step([(request.uid, NO_TOKEN, FinishReason.ABORT)])


def test_abort_that_crosses_the_last_row_is_harmless(front: Frontend) -> None:
    """The request ends while the abort is in flight: one terminal reply suffices."""
    connection = raw_request(front, True)
    request = front.rank.request()
    front.rank.start(request)
    connection.close()
    front.rank.finish(request.uid, FinishReason.LENGTH)
    wait_until_idle(front)  # an abort is sent before the request ends
    assert front.rank.poll() in ([], [AbortRequest(uid=request.uid)])


def test_client_that_does_not_read_is_disconnected(front: Frontend) -> None:
    stalled = raw_request(front, True, pause=True)
    request = front.rank.request()
    front.rank.start(request)
    long = front.rank.encode("harbour " * 40)
    received = []
    for _ in range(4000):
        front.rank.step([(request.uid, token, FinishReason.RUNNING) for token in long])
        received = front.rank.poll()
        if received:
            break
    assert received == [AbortRequest(uid=request.uid, finish=FinishReason.ABORT)]
    front.rank.finish(request.uid)
    assert front.get("/readyz").status_code == 200
    stalled.close()


def test_rows_of_unknown_requests_are_ignored(front: Frontend, send_chat: SendChat) -> None:
    front.rank.generate(10**12, "boat", FinishReason.LENGTH)
    pending = send_chat()
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "boat", FinishReason.LENGTH)
    assert pending.result().json()["choices"][0]["message"]["content"] == "boat"


def test_cached_tokens_are_returned_and_counted(front: Frontend, send_chat: SendChat) -> None:
    before = front.metric("skiff_cached_tokens_total")
    pending = send_chat()
    request = front.rank.request()
    front.rank.start(request, cached=3)
    front.rank.generate(request.uid, "boat", FinishReason.LENGTH)
    assert pending.result().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert front.metric("skiff_cached_tokens_total") == before + 3


@pytest.mark.parametrize(("sent", "returned"), [("trace-7", True), ("two words", False)])
def test_request_id_is_returned_or_replaced(front: Frontend, sent: str, returned: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(httpx.post, front.url + CHAT, json=BODY, headers={"X-Request-Id": sent})
        request = front.rank.request()
        front.rank.finish(request.uid)
        found = pending.result().headers["x-request-id"]
    assert (found == sent) == returned
    assert found


def test_default_seeds_differ(front: Frontend, send_chat: SendChat) -> None:
    seeds = set()
    for _ in range(3):
        pending = send_chat()
        request = front.rank.request()
        seeds.add(request.sampling.seed)
        front.rank.finish(request.uid)
        pending.result()
    assert len(seeds) == 3
