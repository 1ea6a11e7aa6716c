"""Start, drain and failure of the API process, as clients and probes see them."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from frontend import NAME, Echo, Frontend, running_frontend, write_model
from service import wait_until

from skiff_runtime.api.http.late_requests import ACCEPT_SECONDS, QUIET_SECONDS, QUIET_TICKS, LateRequests
from skiff_runtime.api.http.listener import listen
from skiff_runtime.errors import ConfigError
from skiff_runtime.messages import (
    NO_TOKEN,
    Drain,
    FinishReason,
    GenerateRequest,
    PhaseReport,
    ServiceFailed,
    ServiceReady,
    StepStats,
    TextBatch,
    Wire,
)
from skiff_runtime.version import __version__

CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def status(front: Frontend, path: str) -> int:
    return front.get(path).status_code


def wait_for(front: Frontend, path: str, code: int) -> None:
    deadline = time.monotonic() + 20
    while status(front, path) != code:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_progress(front: Frontend, process: str, progress: float) -> dict[str, Any]:
    """Return the body of /startupz once ``process`` reports this progress."""
    deadline = time.monotonic() + 20
    while True:
        start: dict[str, Any] = front.get("/startupz").json()
        if start["processes"].get(process, {}).get("progress") == progress:
            return start
        assert time.monotonic() < deadline, start
        time.sleep(0.01)


def test_start_is_reported_by_probes(model: Path) -> None:
    with running_frontend(model, ready=False) as front:
        assert [status(front, path) for path in ("/livez", "/readyz", "/startupz")] == [200, 503, 503]
        assert [status(front, path) for path in ("/health", "/ping")] == [503, 503]
        assert front.post("/ping").status_code == 503
        refused = front.post(CHAT, **BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "still being loaded" in refused.json()["error"]["message"]
        assert status(front, "/health_generate") == 503
        front.api.send(PhaseReport(process="rank0", phase="config", seconds=0.5))
        front.api.send(PhaseReport(process="rank0", phase="weights", seconds=1.5))
        front.api.send(PhaseReport(process="rank0", phase="weights", seconds=0.2, progress=0.25))
        start = await_progress(front, "rank0", 0.25)
        assert start["status"] == "starting"
        assert start["processes"]["rank0"] == {
            "phase": "weights",
            "progress": 0.25,
            "seconds": {"spawn": 0.5, "config": 1.5},
        }
        assert front.metric("skiff_ready") == 0
        front.api.send(ServiceReady(kv_tokens=2048))
        wait_for(front, "/readyz", 200)
        assert [status(front, path) for path in ("/livez", "/startupz", "/health", "/ping")] == [200] * 4
        assert front.post("/ping").status_code == 200
        assert front.get("/version").json() == {"version": __version__}
        assert front.metric('skiff_start_phase_seconds{phase="config"}') == 1.5
        assert front.metric('skiff_kv_cache_pages{state="free"}') == 128
        info = front.get("/server_info").json()
        assert (info["kv_tokens"], info["model"]["name"], info["config"]["tokenizer_worker_num"]) == (
            2048,
            NAME,
            1,
        )


@contextmanager
def idle_connection(front: Frontend) -> Iterator[socket.socket]:
    """A connection that was kept alive behind a response. A drain closes it once late requests are refused."""
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as idle:
        idle.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        yield idle


def test_drain_finishes_running_requests(model: Path) -> None:
    """Late requests are accepted until none has come for a second, and each response ends its connection."""
    with (
        running_frontend(model) as front,
        ThreadPoolExecutor(4) as pool,
        httpx.Client() as pooled,
        idle_connection(front) as idle,
    ):
        assert pooled.get(front.url + "/livez").headers.get("connection") != "close"
        pending = [pool.submit(front.post, CHAT, **BODY, stream=stream) for stream in (False, True)]
        requests = [front.rank.request() for _ in pending]
        front.rank.start(*requests)
        front.api.send(Drain(timeout_seconds=60))
        wait_for(front, "/readyz", 503)
        pending.append(pool.submit(pooled.post, front.url + CHAT, json=BODY, timeout=60))
        requests.append(front.rank.request())
        front.rank.start(requests[-1])
        assert status(front, "/livez") == 200
        late_until = time.monotonic() + 2 * QUIET_SECONDS
        while time.monotonic() < late_until:
            late = pool.submit(front.post, CHAT, **BODY)
            front.rank.finish(front.rank.request().uid, FinishReason.LENGTH)
            assert (late.result().status_code, late.result().headers["connection"]) == (200, "close")
        assert idle.recv(4096) == b""
        refused = front.post(CHAT, **BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        assert "shutting down" in refused.json()["error"]["message"]
        assert front.metric("skiff_requests_in_flight") == 3
        for request in requests:
            front.rank.generate(request.uid, "boat", FinishReason.LENGTH)
        ended = time.monotonic()
        for each in (pending[0], pending[2]):
            reply = each.result()
            assert reply.json()["choices"][0]["message"]["content"] == "boat"
            assert reply.headers["connection"] == "close"
        assert "[DONE]" in pending[1].result().text
        assert front.wait_exit() == 0
        assert time.monotonic() - ended < 8, "the process ends with the last request, not after a fixed time"


def test_drain_closes_idle_connections(model: Path) -> None:
    """So a client opens its next connection to another replica, and nothing waits for it."""
    with running_frontend(model) as front, ThreadPoolExecutor(1) as pool, idle_connection(front) as idle:
        pending = pool.submit(front.post, CHAT, **BODY)
        request = front.rank.request()
        front.api.send(Drain(timeout_seconds=60))
        assert idle.recv(4096) == b"", "closed while another request is in flight"
        assert not pending.done()
        front.rank.start(request)
        front.rank.generate(request.uid, "boat", FinishReason.LENGTH)
        assert pending.result().status_code == 200
        assert front.wait_exit() == 0


def test_late_requests_are_accepted_until_a_quiet_second_or_the_limit() -> None:
    quiet = LateRequests(timeout_seconds=60)
    assert [quiet.are_over(0, elapsed_seconds=0) for _ in range(QUIET_TICKS)] == [False] * QUIET_TICKS
    assert not quiet.are_over(1, elapsed_seconds=1), "the count of ticks begins again with each request"
    assert [quiet.are_over(1, elapsed_seconds=1) for _ in range(QUIET_TICKS)] == [False] * (
        QUIET_TICKS - 1
    ) + [True]
    for timeout, limit in ((60, ACCEPT_SECONDS), (3, 3)):
        busy = LateRequests(timeout_seconds=timeout)
        assert not busy.are_over(1, elapsed_seconds=limit - 0.01)
        assert busy.are_over(2, elapsed_seconds=limit)


def test_drain_closes_the_connection_of_a_stream_behind_it(model: Path) -> None:
    """A stream that had begun before the drain could not announce that its connection ends."""
    with (
        running_frontend(model) as front,
        ThreadPoolExecutor(2) as pool,
        httpx.Client(base_url=front.url, timeout=60) as client,
        idle_connection(front) as idle,
    ):
        last = pool.submit(front.post, CHAT, **BODY)  # the service does not end before this one
        requests = [front.rank.request()]
        streamed = pool.submit(client.post, CHAT, json={**BODY, "stream": True})
        requests.append(front.rank.request())
        front.rank.start(*requests)
        front.rank.generate(requests[1].uid, "boat")
        deadline = time.monotonic() + 20
        while front.metric("skiff_generation_tokens_total") < 1:
            assert time.monotonic() < deadline
        front.api.send(Drain(timeout_seconds=60))
        assert idle.recv(4096) == b""
        front.rank.generate(requests[1].uid, "boat", FinishReason.LENGTH)
        reply = streamed.result()
        assert "[DONE]" in reply.text and "connection" not in reply.headers
        connections = client._transport._pool.connections  # type: ignore[attr-defined]
        while not all(
            each.has_expired() for each in connections
        ):  # closed: the client opens the next one elsewhere
            assert time.monotonic() < deadline
            time.sleep(0.01)
        front.rank.generate(requests[0].uid, "boat", FinishReason.LENGTH)
        assert last.result().status_code == 200
        assert front.wait_exit() == 0


def wait_for_tokens(front: Frontend, count: int) -> None:
    """Wait until the api process has written at least ``count`` tokens to clients."""
    wait_until(lambda: front.metric("skiff_generation_tokens_total") >= count)


def begin_answers(front: Frontend, requests: Sequence[GenerateRequest]) -> None:
    """Start requests, and wait until each has the first tokens of its answer."""
    front.rank.start(*requests)
    for request in requests:
        front.rank.generate(request.uid, "boat")
    wait_for_tokens(front, len(requests) * len(front.rank.encode("boat")))


def test_drain_timeout_aborts_requests(model: Path) -> None:
    with running_frontend(model) as front, ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(front.post, CHAT, **BODY, stream=stream) for stream in (False, True)]
        requests = [front.rank.request() for _ in pending]
        begin_answers(front, requests)
        front.api.send(Drain(timeout_seconds=0.5))
        replies = [each.result() for each in pending]
        assert [reply.status_code for reply in replies] == [503, 200]
        assert all("shut down before" in reply.text for reply in replies)
        assert front.wait_exit() == 0


def test_sigterm_drains(model: Path) -> None:
    with running_frontend(model) as front:
        front.processes["api"].terminate()
        assert front.wait_exit() == 0
        for name in ("tokenizer0", "detokenizer"):
            front.processes[name].terminate()
            assert front.wait_exit(name) == 0


def test_failure_ends_every_request_with_error(model: Path) -> None:
    with running_frontend(model) as front, ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(front.post, CHAT, **BODY, stream=stream) for stream in (False, True, True)]
        requests = [front.rank.request() for _ in pending]
        begin_answers(front, requests[:2])
        front.api.send(ServiceFailed(message="rank0 was killed by SIGKILL"))
        replies = [each.result() for each in pending]
        assert all("rank0 was killed by SIGKILL" in reply.text for reply in replies)
        assert all("internal_server_error" in reply.text for reply in replies)
        assert sorted(reply.status_code for reply in replies)[-1] == 500
        assert front.wait_exit() == 0


def test_bug_in_the_delivery_ends_every_request_with_an_error_and_then_the_process(model: Path) -> None:
    """Results behind it are lost: an answer that goes on after them would have a gap."""
    with running_frontend(model) as front, ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(front.post, CHAT, **BODY, stream=stream) for stream in (False, True)]
        requests = [front.rank.request() for _ in pending]
        begin_answers(front, requests)
        broken = TextBatch(  # its end has no usage
            uids=np.array([requests[0].uid], Wire.UID).tobytes(),
            texts=[""],
            tokens=np.array([NO_TOKEN], Wire.TOKEN).tobytes(),
            finishes=bytes([FinishReason.STOP]),
            usages=[],
            failed=[],
            stats=StepStats(),
        )
        front.api.send(broken)
        for request in requests:
            front.rank.generate(request.uid, "boat", FinishReason.STOP)
        whole, streamed = (each.result() for each in pending)
        assert whole.status_code == 500 and "internal error" in whole.text
        assert (
            streamed.status_code == 200
            and "internal_error" in streamed.text
            and "[DONE]" not in streamed.text
        )
        assert front.wait_exit() != 0


def test_after_failure_new_requests_get_503(model: Path) -> None:
    with running_frontend(model) as front:
        with httpx.Client(base_url=front.url) as client:
            assert client.get("/livez").status_code == 200
            front.api.send(ServiceFailed(message="gone"))
            deadline = time.monotonic() + 10
            with suppress(httpx.TransportError):  # it has ended before this client asked
                while client.get("/livez").status_code == 200:
                    assert time.monotonic() < deadline
                assert client.post(CHAT, json=BODY).status_code == 503
        assert front.wait_exit() == 0


def test_probes_respond_while_scheduler_is_silent(model: Path) -> None:
    with running_frontend(model) as front, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(front.post, CHAT, **BODY)
        front.rank.request()
        assert [status(front, path) for path in ("/livez", "/readyz", "/metrics")] == [200, 200, 200]
        front.api.send(ServiceFailed(message="gone"))
        assert pending.result().status_code == 500


def test_capacity_is_bounded_by_token_budget(model: Path) -> None:
    """With a budget of one token per step one request can run, despite --max-running-requests, and one can wait."""
    with (
        running_frontend(
            model, max_num_batched_tokens=1, max_running_requests=8, max_queued_requests=1
        ) as front,
        ThreadPoolExecutor(2) as pool,
    ):
        pending = [pool.submit(front.post, CHAT, **BODY) for _ in range(2)]
        requests = [front.rank.request() for _ in pending]
        assert front.post(CHAT, **BODY).status_code == 429
        for request in requests:
            front.rank.finish(request.uid)
        assert [each.result().status_code for each in pending] == [200, 200]


def test_port_in_use_is_reported() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*choose another"):
            listen("127.0.0.1", port)


def test_tokenizer_survives_rejected_requests(model: Path) -> None:
    with running_frontend(model, tokenizer_worker_num=0) as front:
        echo = Echo(front.rank)
        echo.start()
        for _ in range(20):
            assert (
                front.post(
                    CHAT, **{**BODY, "messages": [{"role": "user", "content": "x " * 900}]}
                ).status_code
                == 400
            )
        assert front.post(CHAT, **BODY).status_code == 200
        echo.stop()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no chats on Sundays') }}", "refused these messages: no chats on Sundays"),
        ("{% for m in messages %}", "chat template is malformed: line 1"),
    ],
)
def test_broken_chat_template_fails_only_chats(tmp_path: Path, template: str, message: str) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with running_frontend(tmp_path) as front:
        echo = Echo(front.rank)
        echo.start()
        for stream in (False, True):
            refused = front.post(CHAT, **BODY, stream=stream)
            found = refused.json()["error"]
            assert (refused.status_code, found["code"]) == (400, "chat_template_error")
            assert message in found["message"]
        assert front.post("/v1/completions", model=NAME, prompt="boat").status_code == 200
        echo.stop()


@pytest.mark.parametrize(
    "module",
    ["api.server", "tokenizer.tokenizer_worker", "tokenizer.detokenizer", "offline.llm", "bench.offline"],
)
def test_frontend_processes_import_no_torch(module: str) -> None:
    code = f"import sys, skiff_runtime.{module}; print([m for m in ('torch', 'transformers', 'skiff_runtime.engine') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
