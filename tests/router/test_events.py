"""Pods that report their state: their drain, silence and load decide where requests go, within a fifth of a second."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from fake_pod import SNAPSHOT, Answer, FakePod, PodRequest, json_response, pods
from msgspec.structs import replace
from routers import RunningRouter, make_config, router, until

from skiff_router.event_watcher import EventReader, StreamFault
from skiff_router.pod_state import REPORT_LAG_SECONDS, PodState
from skiff_runtime.state_events import LoadChanged, PodLoad, PromptBlocksChanged

CHAT = "/v1/chat/completions"
REACTION_SECONDS = 0.2


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def says_ok(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(b"{}"))


async def never(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def follow(running: RunningRouter, followed: Sequence[FakePod]) -> None:
    """Wait until the router has the snapshots of pods."""

    async def known() -> bool:
        return all(len(pod._streams) == 1 for pod in followed)

    await until(known)
    await asyncio.sleep(0.1)


async def send(running: RunningRouter, count: int) -> None:
    for _ in range(count):
        assert (await running.post(CHAT, {"model": "a"})).status_code == 200


def served(started: Sequence[FakePod]) -> list[int]:
    """Return how many requests each pod got since the last call."""
    counts = [len(pod.requests) for pod in started]
    for pod in started:
        pod.requests.clear()
    return counts


async def with_reporting_pods(
    test: Any, *answers: Answer, policy: str = "least-load", loads: Sequence[PodLoad] = ()
) -> None:
    async with pods(*answers) as started:
        for pod in started:
            pod.reports = True
        for pod, load in zip(started, loads, strict=False):
            pod.snapshot = replace(SNAPSHOT, load=load)
        config = make_config({"a": tuple(pod.address for pod in started)}, policy=policy)
        async with router(config) as running:
            await follow(running, started)
            await test(running, started)


def test_pod_that_begins_to_drain_gets_nothing_more() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        await send(running, 4)
        assert served(started) == [2, 2]
        started[0].report(LoadChanged("draining", SNAPSHOT.load))
        await asyncio.sleep(REACTION_SECONDS)
        await send(running, 4)
        assert served(started) == [0, 4]
        states = (await running.client.get("/v1/models")).json()["data"][0]["pods"]
        assert states == {"available": 1, "draining": 1}

    run(with_reporting_pods(test, says_ok, says_ok, policy="round-robin"))


def test_silent_pod_is_passed_over_until_it_speaks_again() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        [endpoint] = [
            each
            for each in running.server._registry.backends[0].endpoints
            if each.address == started[0].address
        ]

        async def is_silent() -> bool:
            return endpoint.silent

        async def speaks() -> bool:
            return not endpoint.silent

        started[0].hangs = True
        await until(is_silent)
        await send(running, 4)
        assert served(started) == [0, 4]
        started[0].hangs = False
        await until(speaks)
        await send(running, 4)
        assert served(started) == [2, 2]

    run(with_reporting_pods(test, says_ok, says_ok, policy="round-robin"))


def test_requests_go_on_where_all_pods_are_silent() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        for pod in started:
            for stream in pod._streams:
                stream.writer.transport.abort()
            pod.reports = False
        await asyncio.sleep(0.05)
        await send(running, 4)
        assert served(started) == [2, 2]

    run(with_reporting_pods(test, says_ok, says_ok, policy="round-robin"))


def test_least_load_counts_requests_of_other_routers_and_its_own() -> None:
    load = PodLoad(max_requests=1000)

    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        posts = [asyncio.create_task(running.post(CHAT, {"model": "a"})) for _ in range(6)]

        async def arrived() -> bool:
            return sum(len(pod.requests) for pod in started) == 6

        await until(arrived)
        assert served(started) == [0, 4, 2], "the first has more from others than these make"
        for post in posts:
            post.cancel()

    loads = [replace(load, requests=10), load, replace(load, requests=2)]
    run(with_reporting_pods(test, never, never, never, loads=loads))


def test_full_pod_gets_nothing() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        await send(running, 4)
        assert served(started) == [0, 4]

    loads = [PodLoad(requests=5, max_requests=5), PodLoad(requests=50, max_requests=1000)]
    run(with_reporting_pods(test, says_ok, says_ok, loads=loads))


def test_stream_that_was_lost_begins_again_with_a_snapshot() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        started[0].snapshot = replace(SNAPSHOT, load=replace(SNAPSHOT.load, requests=7))
        started[0]._streams[0].number += 1  # a gap
        started[0].report(LoadChanged("ready", PodLoad()))

        async def again() -> bool:
            endpoint = running.server._registry.backends[0].endpoints[0]
            return endpoint.pod.load is not None and endpoint.pod.load.requests == 7

        await until(again)

    run(with_reporting_pods(test, says_ok))


def test_requests_count_until_a_report_acknowledges_them_or_they_end() -> None:
    pod = PodState()
    pod.apply(replace(SNAPSHOT, acknowledges=True), 1.0)
    for number, tokens in enumerate((100, 50, 7)):
        pod.record_request(2.0, tokens, number)
    pod.record_report(60.0)
    assert (pod.requests, pod.unacknowledged_tokens) == (3, 157), (
        "a request may be read late, and is not counted twice"
    )
    pod.apply(LoadChanged("ready", PodLoad(requests=1), received=[1, 99]), 61.0)
    assert (pod.requests, pod.unacknowledged_tokens) == (3, 107)
    pod.forget_request(1)
    pod.forget_request(2)
    assert (pod.requests, pod.unacknowledged_tokens) == (2, 100), "one in the report, one on its way"


def test_pod_acknowledges_the_requests_of_the_router_that_follows_it() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        pod = started[0]
        pod.report(replace(SNAPSHOT, acknowledges=True))
        pod._streams[0].writer.transport.abort()  # the router comes back to the new snapshot
        state = running.server._registry.backends[0].endpoints[0].pod

        async def counts(requests: int) -> None:
            async def reached() -> bool:
                return state.acknowledges and state.unacknowledged_requests == requests

            await until(reached)

        await counts(0)
        posts = [asyncio.create_task(running.post(CHAT, {"model": "a"})) for _ in range(3)]
        await counts(3)

        async def arrived() -> bool:
            return len(pod.requests) == 3

        await until(arrived)
        routers, numbers = zip(
            *(each.headers["x-skiff-router"].split("/") for each in pod.requests), strict=True
        )
        [router_id] = set(routers)
        assert f"router={router_id}" in pod.event_targets[-1] and len(set(numbers)) == 3
        pod.report(LoadChanged("ready", PodLoad(requests=2), received=[int(each) for each in numbers[:2]]))
        await counts(1)
        assert state.requests == 3
        posts[2].cancel()
        await counts(0)
        for post in posts:
            post.cancel()

    run(with_reporting_pods(test, never))


def test_client_cannot_name_a_router() -> None:
    async def test(running: RunningRouter, started: list[FakePod]) -> None:
        await running.client.post(CHAT, json={"model": "a"}, headers={"X-Skiff-Router": "forged/1"})
        [request] = started[0].requests
        assert "forged" not in request.headers["x-skiff-router"]

    run(with_reporting_pods(test, says_ok))


def test_requests_count_until_a_later_report_where_a_pod_does_not_acknowledge_them() -> None:
    pod = PodState()
    pod.record_request(1.0, 100, 0)
    assert pod.unacknowledged_requests == 0, "without reports the router's own count is used"
    pod.apply(SNAPSHOT, 1.0)
    pod.record_request(2.0, 100, 1)
    pod.record_request(3.0, 50, 2)
    assert (pod.requests, pod.unacknowledged_tokens) == (2, 150)
    pod.apply(LoadChanged("ready", PodLoad(requests=1)), 2.0 + REPORT_LAG_SECONDS / 2)
    assert (pod.requests, pod.unacknowledged_tokens) == (3, 150), "this report may be older than the request"
    pod.record_report(2.5)
    assert (pod.requests, pod.unacknowledged_tokens) == (2, 50)
    pod.forget()
    assert (pod.requests, pod.unacknowledged_tokens) == (0, 0)


def test_estimate_of_what_arrives_replaces_the_mean() -> None:
    pod = PodState()
    pod.apply(replace(SNAPSHOT, load=PodLoad(max_requests=10)), 1.0)
    pod.record_request(1.0, 100, 0)
    pod.apply(LoadChanged("ready", PodLoad(requests=1, max_requests=10)), 2.0)
    assert 0 < pod.reported_tokens < 100, "a pod without estimates"
    pod.apply(LoadChanged("ready", PodLoad(requests=1, max_requests=10, arriving_tokens=3000)), 2.0)
    assert pod.reported_tokens == 3000


@pytest.mark.parametrize("count", range(6))
def test_cached_blocks_are_counted_from_the_beginning(count: int) -> None:
    pod, blocks = PodState(), [11, 12, 13, 14, 15]
    pod.apply(replace(SNAPSHOT, prompt_blocks=[99]), 0.0)
    pod.apply(PromptBlocksChanged(stored=blocks[:count], removed=[]), 0.0)
    assert pod.count_cached_blocks(blocks) == count
    assert pod.count_cached_blocks([*blocks[:2], 77]) == min(count, 2)
    pod.apply(PromptBlocksChanged(stored=[], removed=blocks[2:]), 0.0)
    assert pod.count_cached_blocks(blocks) == min(count, 2)


def test_stream_is_read_in_any_pieces() -> None:
    data = b""
    for number, event in enumerate([SNAPSHOT, LoadChanged("ready", PodLoad(requests=3))]):
        import msgspec

        data += b"id: %d\ndata: %b\n\n:\n\n" % (number, msgspec.json.encode(event))
    for size in (1, 7, len(data)):
        reader = EventReader()
        events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
        assert events == [SNAPSHOT, LoadChanged("ready", PodLoad(requests=3))]


@pytest.mark.parametrize(
    "data",
    [
        b'id: 0\ndata: {"type":"load","state":"","load":{}}\n\n',
        b"id: 0\ndata: {}\n\n",
        b"id: 0\ndata: [\n\n",
        b"data: 1\n\n",
        b"id: 1\ndata: "
        + json.dumps({"type": "prompt_blocks", "stored": [], "removed": []}).encode()
        + b"\n\n",
    ],
)
def test_faulty_stream_is_refused(data: bytes) -> None:
    with pytest.raises(StreamFault):
        EventReader().feed(data)
