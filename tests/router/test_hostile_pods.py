"""Pods whose responses are cut, mangled or endless: each client gets one response or a closed connection, and nothing leaks."""

import asyncio
import os
import random
from pathlib import Path
from typing import Final

import httpx
import pytest
from fake_pod import STREAM_HEAD, Answer, FakePod, PodRequest, chunk, event, json_response, pods
from routers import RunningRouter, make_config, router, run, until

CHAT: Final = "/v1/chat/completions"
SHORT: Final = 200
FULL: Final = int(os.environ.get("SKIFF_TEST_ROUTER_FUZZ_REQUESTS", "20000"))
SEED: Final = int(os.environ.get("SKIFF_TEST_ROUTER_FUZZ_SEED", "7"))
CONCURRENCY: Final = 8
GOOD: Final = json_response(b'{"pod": "good"}')
STREAM: Final = STREAM_HEAD + event("one") + event("two") + event("[DONE]") + chunk(b"")
HEAD: Final = "HTTP/1.1 200 OK\r\n"
RESPONSES: Final = (
    b"",
    b"\x16\x03\x01\x02",
    b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + GOOD,
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    f"{HEAD}content-length: 5\r\ncontent-length: 6\r\n\r\nhello".encode(),
    f"{HEAD}content-length: 99\r\n\r\nshort".encode(),
    f"{HEAD}content-length: -1\r\n\r\n".encode(),
    f"{HEAD}transfer-encoding: chunked\r\n\r\nzz\r\n".encode(),
    f"{HEAD}transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n".encode(),
    f"{HEAD}x: {'y' * 70_000}\r\ncontent-length: 0\r\n\r\n".encode(),
    f"{HEAD}x-skiff-usage: prompt=9{'9' * 40}, cached=1\r\ncontent-length: 2\r\n\r\n{{}}".encode(),
    f"{HEAD}connection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode(),
    GOOD + GOOD,
    GOOD + b"surplus",
    STREAM,
    STREAM.replace(b"data: two\n\n", b"data: t\xff\x00\n\n"),
    STREAM_HEAD + chunk(b"data: no end " + b"x" * 300_000) + chunk(b""),
    STREAM_HEAD
    + chunk(b'data: {"usage": {"prompt_tokens": -1}}\n\n')
    + b"0\r\nx-skiff-usage: nonsense\r\n\r\n",
    STREAM_HEAD + chunk(b'data: {"usage": [' + b"[" * 100_000 + b"\n\n") + chunk(b""),
    STREAM_HEAD + b"0\r\n" + b"t: v\r\n" * 1000 + b"\r\n",
)


def mangle(draw: random.Random, data: bytes) -> bytes:
    """Return a response with a few bytes changed, or cut."""
    mangled = bytearray(data)
    for _ in range(draw.choice((0, 0, 1, 3))):
        if mangled:
            mangled[draw.randrange(len(mangled))] = draw.randrange(256)
    return bytes(mangled[: draw.randrange(len(mangled) + 1)] if draw.random() < 0.3 else mangled)


def hostile(draw: random.Random) -> Answer:
    """Return the answers of a pod."""

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        data = mangle(draw, draw.choice(RESPONSES))
        while data:
            size = draw.choice((1, 100, len(data)))
            writer.write(data[:size])
            data = data[size:]
            if draw.random() < 0.01:
                await asyncio.sleep(0)
        await writer.drain()
        if draw.random() < 0.5:
            writer.transport.abort()

    return answer


async def ask(running: RunningRouter, draw: random.Random) -> int:
    """Send a request, and now and then leave early. Returns its status; 0 if the connection was closed, 1 if it was left.

    A mangled response may have any status, but only the router's own failure is an internal error.
    """
    body = b'{"model": "a", "stream": true}'
    headers = {"authorization": "Bearer key"}
    try:
        async with asyncio.timeout(draw.choice((0.01, 15, 15, 15))):
            reply = await running.client.post(CHAT, content=body, headers=headers)
    except httpx.HTTPError:
        return 0
    except TimeoutError:
        return 1
    assert b"internal_error" not in reply.content
    return reply.status_code


async def fuzz(config_keys: str, count: int) -> None:
    draw = random.Random(SEED)
    async with pods(hostile(draw), hostile(draw)) as started:
        addresses = tuple(pod.address for pod in started)
        config = make_config({"a": addresses}, api_key_file=config_keys, first_byte_timeout_seconds=0.5)
        async with router(config) as running:
            left = count

            async def work() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    statuses[await ask(running, draw)] = None

            statuses: dict[int, None] = {}
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(work())
            assert {200, 502} <= statuses.keys(), statuses
            await assert_nothing_is_left(running, started)


async def assert_nothing_is_left(running: RunningRouter, started: list[FakePod]) -> None:
    """Assert that no request is counted as in progress, and that the router serves as soon as its pods do."""

    async def good(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(GOOD)

    for pod in started:
        pod.answer = good

    async def answers() -> bool:
        reply = await running.post(CHAT, {"model": "a"}, headers={"authorization": "Bearer key"})
        return reply.status_code == 200 and reply.json() == {"pod": "good"}

    async def idle() -> bool:
        metrics = await running.metrics()
        in_flight = [value for name, value in metrics.items() if "in_flight" in name]
        return len(in_flight) == 2 and not any(in_flight)

    await until(answers)
    await until(idle)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("team: key\n")
    return str(path)


def test_random_responses(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    run(fuzz(keys, SHORT), timeout_seconds=240)
    assert "request_handler_failed" not in caplog.text


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_responses_at_length(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    run(fuzz(keys, FULL), timeout_seconds=3500)
    assert "request_handler_failed" not in caplog.text
