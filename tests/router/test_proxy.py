"""The router against pods whose every byte is chosen: routing, retries, broken streams, hung pods, clients that leave."""

import asyncio
import json
from typing import Any

import pytest
from fake_pod import (
    DRAINING,
    STREAM_HEAD,
    Answer,
    PodRequest,
    chunk,
    event,
    json_response,
    pods,
)
from routers import make_config, routed, router, run, until

from skiff_router.prober import Prober
from skiff_router.server import RouterServer

CHAT = "/v1/chat/completions"


def says(text: str) -> Answer:
    """Return an answer of one JSON response."""

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(json.dumps({"pod": text}).encode()))

    return answer


def streams(*events: str, then: str = "end", pause: float = 0.0) -> Answer:
    """Return an answer that streams events, and then ends, resets its connection or hangs."""

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for text in events:
            writer.write(event(text))
            await writer.drain()
            await asyncio.sleep(pause)
        if then == "end":
            writer.write(chunk(b""))
        elif then == "reset":
            writer.transport.abort()
        elif then == "half an event":
            writer.write(chunk(b'data: {"half'))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
        else:
            await asyncio.Event().wait()

    return answer


async def resets(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def refuses(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(DRAINING)


def test_request_goes_to_the_pods_of_its_model_in_turn_with_its_path_and_headers() -> None:
    async def test() -> None:
        async with pods(says("a0"), says("a1"), says("b")) as (a0, a1, b):
            config = make_config({"a": (a0.address, a1.address), "b": (b.address,)})
            async with router(config) as running:
                headers = {"x-request-id": "id-7", "authorization": "Bearer secret"}
                body = {"model": "a", "n": 1.50, "text": "é"}
                replies = [await running.post(f"{CHAT}?x=1", body, headers=headers) for _ in range(4)]
                assert sorted(reply.json()["pod"] for reply in replies) == ["a0", "a0", "a1", "a1"]
                assert {reply.headers["x-request-id"] for reply in replies} == {"id-7"}
                assert (await running.post(CHAT, {"model": "b"})).json() == {"pod": "b"}
                seen = a0.requests[0]
                assert (seen.method, seen.target) == ("POST", f"{CHAT}?x=1")
                assert seen.body == json.dumps(body).encode(), "the body is passed on as it is"
                assert seen.headers["x-request-id"] == "id-7"
                assert seen.headers["authorization"] == "Bearer secret", "without keys here, pods check them"
                assert seen.headers["host"] == str(a0.address)

    run(test())


def test_unknown_model_gets_a_404_that_names_the_models() -> None:
    async def test() -> None:
        async with pods(says("a")) as (a,), router(make_config({"a": (a.address,)})) as running:
            reply = await running.post(CHAT, {"model": "z"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
            assert "models: a" in reply.json()["error"]["message"]
            assert not a.requests

    run(test())


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b"", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b'{"model": 3}', "cannot be read"),
        (b"{}", "'model' is missing"),
        (b'{"model": "a"', "cannot be read"),
    ],
)
def test_body_without_a_model_gets_a_400(body: bytes, wanted: str) -> None:
    async def test() -> None:
        async with pods(says("a")) as (a,), router(make_config({"a": (a.address,)})) as running:
            reply = await running.client.post(CHAT, content=body)
            assert reply.status_code == 400
            assert wanted in reply.json()["error"]["message"]

    run(test())


@pytest.mark.parametrize("bad", [resets, refuses], ids=["resets", "refuses"])
def test_request_that_a_pod_did_not_answer_is_retried_on_another_one(
    monkeypatch: pytest.MonkeyPatch, bad: Answer
) -> None:
    monkeypatch.setattr("skiff_router.prober.PROBE_SECONDS", 60.0)  # a probe would bring it back

    async def test() -> None:
        async with routed(bad, says("good")) as (running, (broken, _)):
            for _ in range(4):
                reply = await running.post(CHAT, {"model": "a"})
                assert (reply.status_code, reply.json()) == (200, {"pod": "good"})
            assert 1 <= len(broken.requests) <= 2, "a pod that fails or drains is soon left out"
            metrics = await running.metrics()
            assert metrics['skiff_router_retries_total{model="a"}'] == len(broken.requests)

    run(test())


def test_pod_that_refuses_connections_is_left_out_until_it_is_back() -> None:
    async def test() -> None:
        async with pods(says("first"), says("second")) as (first, second):
            await first.stop()
            async with router(make_config({"a": (first.address, second.address)})) as running:
                for _ in range(4):
                    assert (await running.post(CHAT, {"model": "a"})).json() == {"pod": "second"}
                await first.start()

                async def answers() -> bool:
                    return bool((await running.post(CHAT, {"model": "a"})).json() == {"pod": "first"})

                await until(answers)

    run(test())


def test_stream_is_passed_on_event_by_event() -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD + event("one"))
            await writer.drain()
            await released.wait()
            writer.write(chunk(b"data: t") + chunk(b"wo\n\n") + event("[DONE]") + chunk(b""))

        async with routed(answer) as (running, _), running.stream(CHAT) as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            parts = reply.aiter_raw()
            assert await anext(parts) == b"data: one\n\n"
            released.set()
            assert b"".join([part async for part in parts]) == b"data: two\n\ndata: [DONE]\n\n"

    run(test())


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_are_passed_on_whole_whatever_ends_their_lines(line_end: str) -> None:
    """The pod sends each event in two pieces and cuts it within its last line end. The client gets it before the next event."""
    seen = asyncio.Event()

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for text in ("a", "b"):
            data = f'data: {{"text": "{text}"}}{2 * line_end}'.encode()
            writer.write(chunk(data[:-1]))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(chunk(data[-1:]))
            await writer.drain()
            if text == "a":
                await asyncio.wait_for(seen.wait(), 10)
        usage = '{"usage": {"prompt_tokens": 5, "completion_tokens": 2}}'
        writer.write(chunk(f"data: {usage}{2 * line_end}".encode()) + chunk(b""))

    async def test() -> None:
        async with routed(answer) as (running, _):
            text = ""
            async with running.stream(CHAT) as reply:
                async for part in reply.aiter_text():
                    text += part
                    if "a" in text and text.endswith(2 * line_end):
                        seen.set()
            first = f'data: {{"text": "a"}}{2 * line_end}data: {{"text": "b"}}{2 * line_end}'
            assert text.startswith(first)
            metrics = await running.metrics()
            assert metrics['skiff_router_tokens_total{key="",kind="completion",model="a"}'] == 2

    run(test())


@pytest.mark.parametrize("then", ["reset", "half an event"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_stream_that_breaks_ends_with_an_error_event_and_is_not_retried(path: str, then: str) -> None:
    async def test() -> None:
        async with routed(streams("one", then=then), streams("one", then=then)) as (running, both):
            reply = await running.post(path, {"model": "a", "stream": True})
            first, last = reply.text.removesuffix("\n\n").split("\n\n")
            assert first == "data: one"
            assert last.startswith("event: error\ndata: " if path == "/v1/messages" else "data: ")
            assert "broke off" in last
            assert json.loads(last.partition("data: ")[2])["error"]["message"]
            assert sum(len(pod.requests) for pod in both) == 1

    run(test())


def test_hung_pod_is_ejected_and_its_requests_go_to_another_one() -> None:
    async def test() -> None:
        async with routed(says("hung"), says("good")) as (running, (hung, _)):
            hung.hangs = True
            replies = await asyncio.gather(*(running.post(CHAT, {"model": "a"}) for _ in range(6)))
            assert {reply.json()["pod"] for reply in replies} == {"good"}
            metrics = await running.metrics()
            assert metrics['skiff_router_endpoints{model="a",state="ejected"}'] == 1

    run(test())


def test_first_byte_has_a_time_limit() -> None:
    async def never(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        async with routed(never, first_byte_timeout_seconds=0.3) as (running, _):
            reply = await running.post(CHAT, {"model": "a"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")

    run(test())


def test_client_that_leaves_ends_the_request_at_the_pod() -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD)
            try:
                while not writer.transport.is_closing():
                    writer.write(event("more"))
                    await writer.drain()
                    await asyncio.sleep(0.01)
            finally:
                left.set()

        async with routed(answer) as (running, _):
            async with running.stream(CHAT) as reply:
                await anext(reply.aiter_raw())
            async with asyncio.timeout(10):
                await left.wait()

            async def idle() -> bool:
                return not (await running.metrics())['skiff_router_requests_in_flight{model="a"}']

            await until(idle)
            metrics = await running.metrics()
            assert metrics['skiff_router_requests_total{code="499",model="a"}'] == 1

    run(test())


def test_slow_client_stops_the_reading_from_the_pod() -> None:
    async def test() -> None:
        sent = 0

        async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(STREAM_HEAD)
            for _ in range(2000):
                writer.write(event("x" * 50_000))
                await writer.drain()
                sent += 50_000
            writer.write(chunk(b""))

        async with routed(answer) as (running, _), running.stream(CHAT) as reply:
            before = -1
            async with asyncio.timeout(30):
                while sent != before:
                    before = sent
                    await asyncio.sleep(0.5)
            assert sent < 50_000_000, "the router must not take in what the client does not read"
            total = sum([len(part) async for part in reply.aiter_raw()])
            assert total == 2000 * 50_008

    run(test())


def test_models_and_probes_and_unknown_paths_are_answered_by_the_router() -> None:
    async def test() -> None:
        async with pods(says("a"), says("b")) as (a, b):
            config = make_config({"m1": (a.address, b.address), "m0": (b.address,)})
            async with router(config) as running:
                models = (await running.client.get("/v1/models")).json()["data"]
                assert [(each["id"], each["state"], each["pods"]) for each in models] == [
                    ("m0", "ready", {"available": 1}),
                    ("m1", "ready", {"available": 2}),
                ]
                assert (await running.client.get("/readyz")).status_code == 200
                assert (await running.client.get("/nothing")).status_code == 404
                assert (await running.client.get(CHAT)).status_code == 405
                assert not a.requests

    run(test())


def test_native_endpoint_is_routed_by_a_header_and_its_body_is_left_as_it_is() -> None:
    async def test() -> None:
        async with pods(says("a"), says("b")) as (a, b):
            config = make_config({"a": (a.address,), "b": (b.address,)})
            async with router(config) as running:
                body = {"text": "x", "stream": False}
                reply = await running.post("/generate", body, headers={"x-skiff-model": "b"})
                assert reply.json() == {"pod": "b"}
                assert b.requests[0].body == json.dumps(body).encode()
                assert "x-skiff-model" not in b.requests[0].headers
                missing = await running.post("/generate", body)
                assert (missing.status_code, missing.json()["error"]["param"]) == (400, "x-skiff-model")
                unknown = await running.post("/generate", body, headers={"x-skiff-model": "z"})
                assert unknown.status_code == 404
                assert "models: a, b" in unknown.json()["error"]["message"]
                assert not a.requests

    run(test())


def test_keys_are_checked_here_and_not_passed_on(tmp_path: Any) -> None:
    async def test() -> None:
        keys = tmp_path / "keys"
        keys.write_text("team: client-key\n")
        backend_key = tmp_path / "backend-key"
        backend_key.write_text("pod-key\n")
        async with pods(says("a")) as (a,):
            config = make_config(
                {"a": (a.address,)}, api_key_file=str(keys), backend_api_key_file=str(backend_key)
            )
            async with router(config) as running:
                assert (await running.post(CHAT, {"model": "a"})).status_code == 401
                headers = {"authorization": "Bearer client-key"}
                assert (await running.post(CHAT, {"model": "a"}, headers=headers)).status_code == 200
                assert a.requests[0].headers["authorization"] == "Bearer pod-key"
                backend_key.write_text("two\nkeys\n")
                reloaded = 'skiff_router_last_reload_successful{flag="--backend-api-key-file"}'

                async def is_refused() -> bool:
                    return (await running.metrics())[reloaded] == 0

                await until(is_refused)
                assert (await running.post(CHAT, {"model": "a"}, headers=headers)).status_code == 200
                assert a.requests[-1].headers["authorization"] == "Bearer pod-key", "the last good key stays"
                backend_key.write_text("next-key\n")

                async def is_sent() -> bool:
                    await running.post(CHAT, {"model": "a"}, headers=headers)
                    return a.requests[-1].headers["authorization"] == "Bearer next-key"

                await until(is_sent)

    run(test())


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_response_without_a_body_may_have_a_length(status: str) -> None:
    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 5\r\n\r\n".encode())

    async def test() -> None:
        async with routed(answer) as (running, _):
            reply = await running.post(CHAT, {"model": "a"})
            assert (reply.status_code, reply.content) == (int(status[:3]), b"")
            assert (await running.client.get("/readyz")).status_code == 200

    run(test())


@pytest.mark.parametrize("status", [42, 999])
def test_status_that_http_does_not_have_is_a_failure_of_the_pod(status: int) -> None:
    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status:03d} What\r\ncontent-length: 0\r\n\r\n".encode())

    async def test() -> None:
        async with routed(answer) as (running, _):
            reply = await running.post(CHAT, {"model": "a"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_failed")

    run(test())


def test_malformed_deadline_is_refused_here() -> None:
    async def test() -> None:
        async with routed(says("a")) as (running, (pod,)):
            headers = {"x-request-timeout-seconds": "soon"}
            reply = await running.post(CHAT, {"model": "a"}, headers=headers)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout-seconds")
            assert not pod.requests

    run(test())


def test_router_ends_when_a_task_in_the_background_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its prober it would go on routing to pods that hang."""

    async def fail(prober: Prober) -> None:
        raise RuntimeError("a bug")

    async def test() -> None:
        monkeypatch.setattr(Prober, "run", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            await RouterServer(make_config({"a": ()})).serve()

    run(test())


def test_all_pods_failing_is_one_error() -> None:
    async def test() -> None:
        async with routed(resets, resets) as (running, _):
            reply = await running.post(CHAT, {"model": "a"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_failed")

    run(test())


def test_drain_ends_running_streams_and_serves_late_requests_first() -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD + event("one"))
            await writer.drain()
            await released.wait()
            writer.write(event("[DONE]") + chunk(b""))

        async with routed(answer) as (running, _), running.stream(CHAT) as reply:
            parts = reply.aiter_raw()
            await anext(parts)
            assert (await running.client.get("/readyz")).status_code == 200
            running.server.drain()
            late = await running.client.get("/v1/models")
            assert (late.status_code, late.headers["connection"]) == (200, "close")
            assert (await running.client.get("/readyz")).status_code == 503
            released.set()
            assert b"".join([part async for part in parts]).endswith(b"data: [DONE]\n\n")
            await asyncio.wait_for(running.stopped, 20)

    run(test())
