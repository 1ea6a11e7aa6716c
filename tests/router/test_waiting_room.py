"""Requests for a model without a ready pod: they wait, ask for a pod, see its start, and are handed over; and all limits."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from fake_api_server import FakeApiServer, api_server
from fake_pod import STREAM_HEAD, FakePod, PodRequest, chunk, event, json_response, pods
from routers import RunningRouter, make_config, router, until

from skiff_router import startup_progress
from skiff_router.scaling import Scaling

CHAT = "/v1/chat/completions"
AUTOSCALING = {"maxReplicas": 8, "targets": {"concurrency": 4}}
LOADING = {
    "processes": {
        "api": {"phase": "ready", "progress": 1.0},
        "rank 0": {"phase": "weights", "progress": 0.43},
        "rank 1": {"phase": "weights", "progress": 0.8},
    }
}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def answers(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    """Answer as a pod that loads, later as one that serves: with the request's number, in one body or in two events."""
    if request.target == "/startupz":
        writer.write(json_response(json.dumps(LOADING).encode()))
        return
    body = json.loads(request.body)
    if body.get("stream"):
        writer.write(STREAM_HEAD + event("one") + event("[DONE]") + chunk(b""))
        return
    writer.write(json_response(json.dumps({"n": body.get("n")}).encode()))


def asked(pod: FakePod) -> list[Any]:
    """Return the numbers of the requests that a pod got, in their order."""
    return [json.loads(each.body).get("n") for each in pod.requests if each.method == "POST"]


@contextlib.asynccontextmanager
async def cluster(**options: Any) -> AsyncIterator[tuple[FakeApiServer, RunningRouter, FakePod]]:
    """Run an API server with a service at zero replicas, a router, and a pod that is not known to either."""
    async with api_server() as (api, access), pods(answers) as (pod,):
        api.put_service("m", replicas=0, autoscaling=AUTOSCALING)
        async with router(make_config({}, kubernetes=True, **options), access) as running:

            async def is_ready() -> bool:
                return (await running.client.get("/readyz")).status_code == 200

            await until(is_ready)
            yield api, running, pod


def post(running: RunningRouter, number: int = 0, **fields: Any) -> asyncio.Task[Any]:
    """Begin a request."""
    return asyncio.get_running_loop().create_task(running.post(CHAT, {"model": "m", "n": number, **fields}))


async def waiting(running: RunningRouter, count: int) -> None:
    """Wait until as many requests wait."""

    async def holds() -> bool:
        metrics = await running.metrics()
        return metrics.get('skiff_router_waiting_requests{model="m"}', 0) == count

    await until(holds)


def test_requests_at_zero_ask_for_a_pod_and_are_handed_over_in_order() -> None:
    async def test() -> None:
        async with cluster() as (api, running, pod):
            first = post(running, 0)

            async def is_asked() -> bool:
                return api.scaled == [1]

            await until(is_asked)
            others = []
            for number in range(1, 10):
                others.append(post(running, number))
                await asyncio.sleep(0.02)
            await waiting(running, 10)

            async def asks_for_more() -> bool:
                return api.scaled[-1:] == [3]  # ten requests, four for each pod

            await until(asks_for_more)
            api.put_pods("m", pod, ready=False)
            await asyncio.sleep(0.1)
            assert not first.done()
            api.put_pods("m", pod)
            replies = await asyncio.gather(first, *others)
            assert [reply.json() for reply in replies] == [{"n": number} for number in range(10)]
            assert asked(pod) == list(range(10))
            metrics = await running.metrics()
            assert metrics['skiff_router_waits_total{model="m",outcome="released"}'] == 10
            assert metrics['skiff_router_scale_requests_total{model="m",result="accepted"}'] == len(
                api.scaled
            )
            assert metrics['skiff_router_first_pod_request_seconds_count{model="m"}'] == 1
            later = await asyncio.gather(*(post(running, number) for number in range(20)))
            assert {reply.status_code for reply in later} == {200}
            assert (await running.metrics())['skiff_router_waits_total{model="m",outcome="released"}'] == 10

    run(test())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_stream_shows_the_start_and_goes_on_with_the_pods_events(path: str) -> None:
    async def test() -> None:
        async with cluster() as (api, running, pod):
            body = {"model": "m", "stream": True}
            async with running.client.stream("POST", path, json=body) as reply:
                assert reply.status_code == 200
                assert reply.headers["content-type"] == "text/event-stream"
                parts = reply.aiter_raw()
                assert await anext(parts) == b": waiting for a pod\n\n"
                api.put_pods("m", pod, ready=False)
                assert await anext(parts) == b": loading weights 43%\n\n"
                api.put_pods("m", pod)
                rest = b"".join([part async for part in parts])
                assert rest == b"data: one\n\ndata: [DONE]\n\n"

    run(test())


def test_stream_that_is_handed_over_soon_has_no_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skiff_router.waiting_room.PROGRESS_SECONDS", 30.0)

    async def test() -> None:
        async with cluster() as (api, running, pod):
            streamed = post(running, stream=True)
            await waiting(running, 1)
            api.put_pods("m", pod)
            assert (await streamed).text == "data: one\n\ndata: [DONE]\n\n"

    run(test())


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (CHAT, 'data: {"error": {"message": "bad", "code": "c"}}\n\n'),
        ("/v1/responses", 'event: error\ndata: {"type":"error","code":"c","message":"bad","param":null}\n\n'),
        ("/v1/messages", "event: error\ndata: "),
    ],
)
def test_error_of_the_pod_after_comments_is_an_event_of_its_api(path: str, wanted: str) -> None:
    async def refuses(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b'{"error": {"message": "bad", "code": "c"}}', "400 Bad Request"))

    async def test() -> None:
        async with cluster() as (api, running, _), pods(refuses) as (pod,):
            body = {"model": "m", "stream": True}
            async with running.client.stream("POST", path, json=body) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                api.put_pods("m", pod)
                rest = b"".join([part async for part in parts]).decode()
                assert rest.startswith(wanted)
                assert "bad" in rest
            metrics = await running.metrics()
            assert metrics['skiff_router_requests_total{code="400",model="m"}'] == 1

    run(test())


def test_pod_that_crashes_under_its_requests_loses_none() -> None:
    async def crashes(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await asyncio.sleep(0.05)
            writer.transport.abort()

    async def test() -> None:
        async with cluster() as (api, running, pod), pods(crashes) as (crashing,):
            requests = [post(running, number, stream=number % 2) for number in range(8)]
            await waiting(running, 8)
            api.put_pods("m", crashing)

            async def has_crashed() -> bool:
                return len(crashing.requests) >= 8

            await until(has_crashed)
            await crashing.stop()
            await waiting(running, 8)
            api.put_pods("m", pod)
            replies = await asyncio.gather(*requests)
            assert [reply.status_code for reply in replies] == [200] * 8
            assert all(reply.text.endswith(("}", "data: [DONE]\n\n")) for reply in replies)

    run(test())


def test_request_that_kills_every_pod_ends() -> None:
    async def crashes(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        async with cluster() as (api, running, _), pods(crashes) as (pod,):
            api.put_pods("m", pod)
            reply = await post(running)
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_failed")
            assert len(pod.requests) <= 6

    run(test())


def test_limits_on_number_and_bytes_are_a_429_with_the_time_of_the_last_start() -> None:
    async def test() -> None:
        async with cluster(max_waiting_requests=2, max_waiting_bytes=1000) as (api, running, pod):
            status = {"startup": {"readySeconds": 75.4}}
            api.put_service("m", replicas=0, autoscaling=AUTOSCALING, status=status)
            held = post(running)
            await waiting(running, 1)
            reply = await post(running, text="x" * 1000)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
            assert 70 <= int(reply.headers["retry-after"]) <= 75
            second = post(running)
            await waiting(running, 2)
            assert (await post(running)).status_code == 429
            api.put_pods("m", pod)
            assert [(await each).status_code for each in (held, second)] == [200, 200]
            metrics = await running.metrics()
            assert metrics['skiff_router_waits_total{model="m",outcome="rejected"}'] == 2

    run(test())


def test_limit_on_time_is_a_503_and_an_event_of_a_stream() -> None:
    async def test() -> None:
        async with cluster(waiting_timeout_seconds=1.5) as (_, running, _):
            whole, streamed = await asyncio.gather(post(running), post(running, stream=True))
            assert whole.status_code == 503
            assert "not ready within 1.5 s" in whole.json()["error"]["message"].replace(
                "was ready", "not ready"
            )
            assert whole.headers["retry-after"]
            assert streamed.status_code == 200
            first, last = streamed.text.removesuffix("\n\n").split("\n\n")
            assert first == ": waiting for a pod"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"

    run(test())


def test_client_that_leaves_is_removed() -> None:
    async def test() -> None:
        async with cluster() as (api, running, pod):
            leaver, stayer = post(running, 1), post(running, 2)
            await waiting(running, 2)
            leaver.cancel()
            await waiting(running, 1)
            api.put_pods("m", pod)
            assert (await stayer).json() == {"n": 2}
            assert asked(pod) == [2]
            metrics = await running.metrics()
            assert metrics['skiff_router_waits_total{model="m",outcome="disconnected"}'] == 1
            assert metrics['skiff_router_requests_total{code="499",model="m"}'] == 1

    run(test())


def test_drain_ends_the_waiting_requests_with_a_clear_error() -> None:
    async def test() -> None:
        async with cluster() as (_, running, _):
            whole = post(running)
            body = {"model": "m", "stream": True}
            async with running.client.stream("POST", CHAT, json=body) as streamed:
                parts = streamed.aiter_raw()
                await anext(parts)
                running.server.drain()
                last = b"".join([part async for part in parts])
            assert b"the router shuts down" in last
            reply = await whole
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            await asyncio.wait_for(running.stopped, 20)

    run(test())


def test_version_that_has_changed_is_no_obstacle_and_a_refusal_no_end() -> None:
    async def test() -> None:
        async with cluster() as (api, running, pod):
            api.refusal = 409
            request = post(running)

            async def conflicts() -> bool:
                metrics = await running.metrics()
                return metrics.get('skiff_router_scale_requests_total{model="m",result="conflict"}', 0) >= 2

            await until(conflicts)
            assert 'skiff_router_first_pod_request_seconds_count{model="m"}' not in await running.metrics()
            api.refusal = 0

            async def is_asked() -> bool:
                return api.scaled == [1]

            await until(is_asked)
            api.put_service(
                "m", replicas=0, autoscaling=AUTOSCALING
            )  # as an idle service that is scaled to zero again

            async def is_asked_again() -> bool:
                return api.scaled == [1, 1]

            await until(is_asked_again)
            metrics = await running.metrics()
            assert metrics['skiff_router_first_pod_request_seconds_count{model="m"}'] == 1
            assert metrics['skiff_router_first_pod_request_seconds_sum{model="m"}'] > 0.05, (
                "with the conflicts"
            )
            api.refusal = 403
            api.put_service("m", replicas=0, autoscaling=AUTOSCALING)

            async def is_refused() -> bool:
                metrics = await running.metrics()
                return metrics.get('skiff_router_scale_requests_total{model="m",result="failed"}', 0) == 1

            await until(is_refused)
            api.put_pods("m", pod)  # somebody else has started one
            assert (await request).status_code == 200

    run(test())


def test_only_a_model_that_expects_a_pod_is_waited_for() -> None:
    async def test() -> None:
        async with cluster() as (api, running, pod):
            api.put_service("m", replicas=1)
            request = post(running)
            await waiting(running, 1)
            assert not api.scaled, "without autoscaling, nothing is asked for"
            api.put_service("m", replicas=0)
            reply = await request
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert "no pod is expected" in reply.json()["error"]["message"]
            assert (await post(running)).status_code == 503
            api.put_service("m", replicas=1)
            api.put_pods("m", pod)

            async def is_served() -> bool:
                return bool((await post(running)).status_code == 200)

            await until(is_served)

    run(test())


@pytest.mark.parametrize(
    ("fields", "requests", "size", "wanted"),
    [
        ({}, 1000, 1 << 30, 1),
        ({"concurrency": 32}, 32, 0, 1),
        ({"concurrency": 32}, 33, 0, 2),
        ({"concurrency": 1}, 1000, 0, 4),
        ({"queued_tokens": 1000}, 1, 8004, 3),
        ({"concurrency": 1, "max_replicas": 2}, 1000, 0, 2),
    ],
)
def test_as_many_pods_are_needed_as_the_targets_say(
    fields: dict[str, int], requests: int, size: int, wanted: int
) -> None:
    scaling = Scaling(**{"replicas": 0, "max_replicas": 8, **fields})  # type: ignore[arg-type]
    assert scaling.needed(requests, size) == wanted


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ({}, "starting the server"),
        ({"a": {"phase": "unknown"}}, "starting the server"),
        (LOADING["processes"], "loading weights 43%"),
        (
            {"a": {"phase": "weights", "progress": 0}, "b": {"phase": "warmup", "progress": 0.5}},
            "loading weights",
        ),
        ({"a": {"phase": "warmup", "progress": 7.5}}, "warming up"),
        ({"a": {"phase": "ready", "progress": 1}}, "ready"),
    ],
)
def test_progress_is_that_of_the_slowest_process(processes: Any, words: str) -> None:
    assert startup_progress.describe(json.dumps({"processes": processes}).encode()) == words
