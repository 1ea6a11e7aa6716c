"""GET /events: what a router learns of a pod, with the test in place of the scheduler."""

import asyncio
import json
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import uvloop
from event_client import EventClient, following
from frontend import NAME, Frontend, running_frontend, write_model

from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.dispatch.state_stream import MAX_SUBSCRIBERS, StateStream
from skiff_runtime.api.http.asgi import AsgiWriter, Message
from skiff_runtime.api.http.auth import derive_cache_namespace
from skiff_runtime.config import Config
from skiff_runtime.messages import (
    CacheEvents,
    Drain,
    FinishReason,
    KVBlocksRemoved,
    KVBlocksStored,
    StepStats,
    WatchCache,
)
from skiff_runtime.messages.transport import Sender
from skiff_runtime.prompt_blocks import HASH_DTYPE, hash_body
from skiff_runtime.state_events import (
    MIN_INTERVAL_SECONDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVBlocksChanged,
    LoadChanged,
    PromptBlocksChanged,
    Snapshot,
)

STEP = StepStats(
    queued=3, running=2, pages_total=10, pages_free=4, pages_cached=2, queued_uncached_tokens=700
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model) as front:
        yield front


def cache_events(
    stored: list[int], removed: list[int], *blocks: KVBlocksStored | KVBlocksRemoved, snapshot: bool = False
) -> CacheEvents:
    columns = [np.array(each, HASH_DTYPE).tobytes() for each in (stored, removed)]
    return CacheEvents(snapshot, columns[0], columns[1], list(blocks))


def test_stream_begins_with_a_snapshot_and_goes_on_with_the_load(front: Frontend) -> None:
    with following(front.url) as events:
        snapshot = events.next()
        assert isinstance(snapshot, Snapshot)
        assert (snapshot.model, snapshot.state, snapshot.kv_tokens) == (NAME, "ready", 1024)
        assert snapshot.load.requests == 0 < snapshot.load.max_requests
        front.rank.step([], stats=STEP)
        changed = events.until(lambda event: isinstance(event, LoadChanged) and event.load.waiting > 0)
        assert isinstance(changed, LoadChanged)
        load = changed.load
        assert (load.waiting, load.running, load.queued_tokens, load.kv_cache_usage) == (3, 2, 700, 0.4)
        for _ in range(30):
            front.rank.step([], stats=StepStats(step_seconds=0.01, decode_tokens=2))
            front.rank.step([], stats=StepStats(step_seconds=0.05, decode_tokens=2, prefill_tokens=400))
        time.sleep(0.3)
        front.rank.step([], stats=StepStats(queued=9))
        changed = events.until(lambda event: isinstance(event, LoadChanged) and event.load.waiting == 9)
        assert isinstance(changed, LoadChanged)
        assert changed.load.step_seconds == pytest.approx(0.01)
        assert changed.load.prefill_token_seconds == pytest.approx(0.0001)


def test_silence_is_filled_with_comments(front: Frontend) -> None:
    with following(front.url) as events:
        events.next()
        began = time.monotonic()
        time.sleep(1)
        front.rank.step([], stats=STEP)
        assert isinstance(events.next(), LoadChanged), (
            "nothing but comments comes between the snapshot and a change"
        )
        assert events.heartbeats >= 4, time.monotonic() - began


def test_requests_in_flight_and_drain_are_reported(front: Frontend) -> None:
    with ThreadPoolExecutor(1) as pool, following(front.url) as events:
        events.next()
        pending = pool.submit(front.post, "/v1/completions", model=NAME, prompt="boat")
        request = front.rank.request()
        events.until(lambda event: isinstance(event, LoadChanged) and event.load.requests == 1)
        front.api.send(Drain(timeout_seconds=20))
        events.until(lambda event: isinstance(event, LoadChanged) and event.state == "draining")
        front.rank.start(request)
        front.rank.finish(request.uid, FinishReason.STOP)
        assert pending.result().status_code == 200
        events.until(lambda event: isinstance(event, LoadChanged) and event.load.requests == 0)
        assert events.next() is None, "the stream ends with the service"
    assert front.wait_exit() == 0


def test_content_of_the_prefix_cache_is_reported(front: Frontend) -> None:
    with following(front.url, "prompt_blocks", "kv_blocks") as events:
        first, all_blocks = events.next(), events.next()
        assert isinstance(first, Snapshot) and not first.prompt_blocks
        assert isinstance(all_blocks, KVBlocksChanged) and all_blocks.events == [AllBlocksCleared()]
        assert front.rank.receive() == WatchCache(prompts=True, blocks=True)
        whole = cache_events([7, 8], [], KVBlocksStored([1, 2], None), KVBlocksStored([3], 1), snapshot=True)
        front.rank.step([], cache_events=whole)
        prompts, blocks = (
            events.until(lambda event, kind=kind: isinstance(event, kind))  # type: ignore[misc]
            for kind in (PromptBlocksChanged, KVBlocksChanged)
        )
        assert prompts == PromptBlocksChanged(stored=[7, 8], removed=[])
        assert isinstance(blocks, KVBlocksChanged)
        assert blocks.events == [
            AllBlocksCleared(),
            BlockStored([1, 2], None, 16),
            BlockStored([3], 1, 16),
        ]
        front.rank.step([], cache_events=cache_events([9], [7], KVBlocksRemoved([2])))
        prompts = events.until(lambda event: isinstance(event, PromptBlocksChanged))
        assert prompts == PromptBlocksChanged(stored=[9], removed=[7])
        blocks = events.until(lambda event: isinstance(event, KVBlocksChanged))
        assert isinstance(blocks, KVBlocksChanged) and blocks.events == [BlockRemoved([2])]
        with following(front.url, "prompt_blocks", "kv_blocks") as second:
            snapshot, stored = second.next(), second.next()
            assert isinstance(snapshot, Snapshot) and snapshot.prompt_blocks == [8, 9]
            assert isinstance(stored, KVBlocksChanged)
            assert stored.events == [AllBlocksCleared(), BlockStored([1, 3], None, 16)]
        with following(front.url) as third:
            snapshot = third.next()
            assert isinstance(snapshot, Snapshot) and not snapshot.prompt_blocks


def test_prompts_are_hashed_while_a_router_wants_to_know(front: Frontend) -> None:
    body = json.dumps({"model": NAME, "prompt": "boat " * 220, "max_tokens": 1, "cache_salt": "s"}).encode()

    def send() -> httpx.Response:
        return httpx.post(front.url + "/v1/completions", content=body, timeout=30)

    def serve() -> None:
        request = front.rank.request()
        blocks.append(request.prompt_blocks)
        front.rank.start(request)
        front.rank.finish(request.uid, FinishReason.LENGTH)

    blocks: list[object] = []
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send)
        serve()
        answer.result()
        with following(front.url, "prompt_blocks") as events:
            events.next()
            assert isinstance(front.rank.receive(), WatchCache)
            answer = pool.submit(send)
            serve()
            changed = events.until(
                lambda event: isinstance(event, LoadChanged) and event.load.bytes_per_token > 0
            )
            answer.result()
    assert blocks[0] is None
    assert isinstance(changed, LoadChanged) and 2 < changed.load.bytes_per_token < 6
    assert blocks[1] == hash_body(body, derive_cache_namespace(b"", "s"))


def test_arrival_is_reported_with_what_is_not_cached_of_it(front: Frontend) -> None:
    """Each part of a prompt once, until the scheduler has received the request or it has ended."""
    body = {"model": NAME, "prompt": "boat " * 220, "max_tokens": 1}
    hashed = hash_body(json.dumps(body).encode(), b"")
    assert hashed is not None and len(hashed.names()) == 1
    whole, rest = hashed.text_bytes // 4, (hashed.text_bytes - 1024) // 4

    def send() -> httpx.Response:
        return httpx.post(front.url + "/v1/completions", content=json.dumps(body), timeout=30)

    with ThreadPoolExecutor(3) as pool, following(front.url, "prompt_blocks") as events:

        def reports(tokens: int) -> None:
            events.until(
                lambda event: isinstance(event, LoadChanged) and event.load.arriving_tokens == tokens
            )

        events.next()
        assert isinstance(front.rank.receive(), WatchCache)
        answers, requests = [pool.submit(send)], [front.rank.request()]
        reports(whole)
        answers.append(pool.submit(send))
        requests.append(front.rank.request())
        reports(whole + rest)
        front.rank.step([], stats=StepStats(step_seconds=0.01))
        front.rank.step([], stats=StepStats(received=[requests[0].uid]))
        reports(rest)
        received = StepStats(received=[requests[1].uid])
        front.rank.step([], stats=received, cache_events=cache_events(hashed.names(), []))
        reports(0)
        answers.append(pool.submit(send))
        requests.append(front.rank.request())
        reports(rest)
        for request in requests:
            front.rank.start(request)
            front.rank.finish(request.uid, FinishReason.LENGTH)
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]
        reports(0)


def test_router_learns_which_of_its_requests_a_load_includes(front: Frontend) -> None:
    def send(router: str, path: str = "/v1/completions", body: str = "") -> httpx.Response:
        body = body or json.dumps({"model": NAME, "prompt": "boat", "max_tokens": 1})
        return httpx.post(front.url + path, content=body, headers={"X-Skiff-Router": router}, timeout=30)

    with (
        ThreadPoolExecutor(5) as pool,
        following(front.url, "prompt_blocks", router="one") as one,
        following(front.url, "prompt_blocks", router="two") as two,
        following(front.url, "prompt_blocks") as other,
    ):
        assert [each.next().acknowledges for each in (one, two, other)] == [True, True, False]  # type: ignore[union-attr]
        assert isinstance(front.rank.receive(), WatchCache)
        answers = [pool.submit(send, router) for router in ("one/7", "two/7", "one/8", "one/not-a-number")]
        requests = [front.rank.request() for _ in answers]

        def receive(events: EventClient, *numbers: int) -> None:
            received: list[int] = []
            while sorted(received) != sorted(numbers):
                event = events.next()
                assert isinstance(event, LoadChanged)
                assert len(event.received) <= event.load.requests
                received += event.received

        receive(one, 7, 8)
        receive(two, 7)
        front.rank.step([], stats=StepStats(queued=9))
        for events in (one, two, other):
            last = events.until(lambda event: isinstance(event, LoadChanged) and event.load.waiting == 9)
            assert isinstance(last, LoadChanged) and not last.received
        unreadable = json.dumps(
            {
                "model": NAME,
                "messages": [{"role": "user", "content": "boat"}],
                "max_tokens": 1,
                "chat_template_kwargs": {"unused": math.nan},
            }
        )
        assert hash_body(unreadable.encode(), b"") is None
        answers.append(pool.submit(send, "two/9", "/v1/chat/completions", unreadable))
        requests.append(front.rank.request())
        receive(two, 9)
        for request in requests:
            front.rank.start(request)
            front.rank.finish(request.uid, FinishReason.LENGTH)
        assert [answer.result().status_code for answer in answers] == [200] * 5


@pytest.mark.parametrize("router", ["a/b", "x" * 65, "ü"])
def test_router_id_that_no_header_could_repeat_is_refused(front: Frontend, router: str) -> None:
    refused = httpx.get(front.url + "/events", params={"router": router})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "router"


def test_subscribers_are_bounded_and_unknown_content_is_refused(front: Frontend) -> None:
    refused = front.get("/events?include=weights")
    assert refused.status_code == 400 and "prompt_blocks or kv_blocks" in refused.json()["error"]["message"]
    address = urlsplit(front.url)
    sockets = []
    for _ in range(MAX_SUBSCRIBERS):
        each = socket.create_connection((address.hostname, address.port))
        each.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert each.recv(12) == b"HTTP/1.1 200"
        sockets.append(each)
    full = front.get("/events")
    assert full.status_code == 503 and full.headers["retry-after"]
    for each in sockets:
        each.close()


def test_subscriber_that_does_not_read_is_disconnected(front: Frontend) -> None:
    address = urlsplit(front.url)
    with socket.socket() as slow, following(front.url) as other:
        other.next()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address.hostname, address.port))
        slow.sendall(b"GET /events?include=prompt_blocks HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert front.rank.receive() == WatchCache(prompts=True, blocks=False)
        many = list(range(1 << 63, (1 << 63) + 50_000))
        for _ in range(12):
            front.rank.step([], cache_events=cache_events(many, []))
            time.sleep(0.3)
        front.rank.step([], stats=STEP)
        other.until(lambda event: isinstance(event, LoadChanged) and event.load.waiting == 3)
        slow.settimeout(20)
        received = 0
        while part := slow.recv(1 << 20):
            received += len(part)
        assert received < 12 * 50_000 * 19


def test_changes_that_come_just_before_the_next_events_are_sent() -> None:
    """In less than half a millisecond: uvloop then returns a handle that does not know its time."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])

    class Scheduler:
        def send(self, _message: WatchCache) -> None:
            """Take what is to be watched."""

    async def run() -> None:
        config = Config(model="m", max_model_len=64, max_running_requests=4)
        sender, status = cast(Sender, Scheduler()), ServiceStatus()
        stream = StateStream(config, status, [sender], in_flight=lambda: len(sent), prompt_bytes=lambda _: 0)
        stream.subscribe(AsgiWriter(send, on_overflow=lambda: None), prompt_blocks=True, kv_blocks=False)
        loop = asyncio.get_running_loop()
        for _ in range(100):  # until the clock stands still meanwhile
            count, start = len(sent), loop.time()
            for _ in range(3):
                stream._flushed_at = start + 0.0003 - MIN_INTERVAL_SECONDS
                stream.flush_soon()
            if loop.time() == start:
                break
        else:
            pytest.fail("the clock moved in each attempt")
        assert len(sent) == count, "they are gathered"
        async with asyncio.timeout(30):
            while len(sent) == count:  # noqa: ASYNC110 (what is awaited sends no event)
                await asyncio.sleep(0.001)
        stream.close()

    uvloop.run(run())
