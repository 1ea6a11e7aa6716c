"""Deadlines: a request that takes too long ends with its output so far, and gets exactly one terminal reply."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from frontend import NAME, TIMEOUT_SECONDS, Frontend, answer, running_frontend, write_model

from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, RequestFailed

CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
LIMIT = 2.0


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    with running_frontend(model, request_timeout_seconds=LIMIT) as front:
        yield front


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def submit(
    front: Frontend, pool: ThreadPoolExecutor, seconds: str | None, **body: object
) -> Future[httpx.Response]:
    headers = {} if seconds is None else {"X-Request-Timeout-Seconds": seconds}
    return pool.submit(front.http.post, front.url + CHAT, json={**BODY, **body}, headers=headers)


def assert_expires(front: Frontend, request: GenerateRequest) -> None:
    """Assert that the scheduler receives an abort for the deadline, and nothing else."""
    message = front.rank.receive()
    assert isinstance(message, AbortRequest)
    assert (message.uid, message.finish) == (request.uid, FinishReason.TIMEOUT)


@pytest.mark.parametrize(("seconds", "stream"), [("0.2", False), ("0.2", True), (None, False), ("100", True)])
def test_expired_request_returns_output_so_far(
    front: Frontend, pool: ThreadPoolExecutor, seconds: str | None, stream: bool
) -> None:
    before = front.metric('skiff_aborted_requests_total{reason="deadline"}')
    pending = submit(front, pool, seconds, stream=stream)
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "boat")
    assert_expires(front, request)
    front.rank.finish(request.uid, FinishReason.TIMEOUT)
    assert answer(pending.result()) == ("boat", "length")
    assert front.metric('skiff_aborted_requests_total{reason="deadline"}') == before + 1
    assert front.metric("skiff_requests_in_flight") == 0


def test_request_that_never_ran_returns_empty_output(front: Frontend, pool: ThreadPoolExecutor) -> None:
    pending = submit(front, pool, "0.1")
    request = front.rank.request()
    assert_expires(front, request)
    front.rank.finish(request.uid, FinishReason.TIMEOUT)
    [choice] = pending.result().json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_request_within_deadline_is_not_aborted(front: Frontend, pool: ThreadPoolExecutor) -> None:
    pending = submit(front, pool, "60")
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "boat", FinishReason.STOP)
    assert pending.result().json()["choices"][0]["finish_reason"] == "stop"
    assert front.rank.poll() == []


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_invalid_timeout_header_is_rejected(front: Frontend, pool: ThreadPoolExecutor, value: str) -> None:
    response = submit(front, pool, value).result()
    assert response.status_code == 400
    assert "x-request-timeout-seconds" in response.json()["error"]["message"]


def test_unconfirmed_abort_ends_with_error(front: Frontend, pool: ThreadPoolExecutor) -> None:
    """The clients get an error, and rows that arrive later are ignored."""
    whole, stream = submit(front, pool, "2"), submit(front, pool, "2", stream=True, n=2)
    requests = [front.rank.request() for _ in range(3)]
    front.rank.start(*requests)
    for request in requests:
        front.rank.generate(request.uid, "boat")
    response = whole.result(TIMEOUT_SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    events = stream.result(TIMEOUT_SECONDS).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert sum("error" in event for event in events) == 1
    assert front.metric("skiff_requests_in_flight") == 0
    assert len([each for each in front.rank.poll() if isinstance(each, AbortRequest)]) >= 3
    for request in requests:
        front.rank.generate(request.uid, "late", FinishReason.TIMEOUT)
    assert front.get("/readyz").status_code == 200


def test_rejection_by_scheduler_gets_retry_after(front: Frontend, pool: ThreadPoolExecutor) -> None:
    pending = submit(front, pool, None)
    request = front.rank.request()
    rejection = RequestFailed(request.uid, 429, "rate_limit_error", "too many tokens wait", "queue_full")
    before = front.metric('skiff_rejected_requests_total{reason="queue_full"}')
    front.rank.step([], failed=[rejection])
    response = pending.result()
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert front.metric('skiff_rejected_requests_total{reason="queue_full"}') == before + 1
