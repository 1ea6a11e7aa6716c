"""The measurements of ``skiff bench router``, each of one running router in front of stub pods."""

import asyncio
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from skiff_runtime.bench.router.client import Connection, Reply, connect, connections, make_body
from skiff_runtime.bench.router.processes import RunningRouter, StubProcess
from skiff_runtime.bench.router.stub_pods import EVENT_SECONDS, Statistics
from skiff_runtime.prompt_blocks import PROMPT_BLOCK_BYTES

CLIENTS: Final = 32
STEADY_RATE: Final = 500.0
"""Requests a second that every router can serve."""
PROMPT: Final = "What is a pod? " * 130
"""About 2 KB."""
FIRST_BYTE_INTERVAL_SECONDS: Final = 0.02
FAULT_REQUESTS: Final = 200
FAULT_STREAMS: Final = 40
REVIVAL_LIMIT_SECONDS: Final = 90.0
_REVIVAL_POLL_SECONDS: Final = 0.05
GROUPS: Final = 64
TURNS: Final = 8
_HEAD_CHARACTERS: Final = 8192
"""Of a group's prompts in common."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds that a router adds to the first byte: differences of percentiles with and without it."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Faults:
    """The results of requests while one of four pods fails.

    ``failed``: of ``FAULT_REQUESTS`` requests after the pod was killed. ``endings``: how the streams of a killed pod ended.
    ``unanswered``: of as many requests after the pod was stopped, so that it accepts connections and says nothing.
    ``revival_seconds``: from the pod's start to its first request; None if it got none in time.
    """

    failed: int
    endings: dict[str, int]
    unanswered: int
    revival_seconds: float | None


@dataclass(frozen=True, slots=True)
class Routing:
    """Blocks of prompts' common beginnings that pods had already, of those that are not new; and the busiest pod's requests by the mean."""

    hits: float
    imbalance: float


async def measure_requests(router: RunningRouter, seconds: float, *, rate: float = math.inf) -> float:
    """Return the router's CPU microseconds for a request with a whole response, from ``CLIENTS`` clients.

    At most ``rate`` requests a second: a router that answers late would otherwise have less to do in the same time, and a
    request costs more on a machine that waits now and then than on one that is busy.
    """
    body = make_body(PROMPT)
    async with connections(router.port, CLIENTS, router.key) as opened:
        await asyncio.gather(*(each.send(body) for each in opened))
        began, before = time.monotonic(), router.cpu_seconds()
        clients = [
            _repeat(each, body, began + index / rate, began + seconds, CLIENTS / rate)
            for index, each in enumerate(opened)
        ]
        counts = await asyncio.gather(*clients)
        return (router.cpu_seconds() - before) / max(1, sum(counts)) * 1e6


async def _repeat(connection: Connection, body: bytes, start: float, end: float, interval: float) -> int:
    """Send a request every ``interval`` seconds, or later if the one before has no response yet; return those answered."""
    count = 0
    while start < end:
        if interval:
            await asyncio.sleep(start - time.monotonic())
        reply = await connection.send(body)
        count += reply.status == 200
        start = max(start + interval, time.monotonic())
    return count


async def measure_events(router: RunningRouter, streams: int, seconds: float) -> float:
    """Return the router's CPU microseconds for an event of ``streams`` streams at once."""
    events = round(seconds / EVENT_SECONDS)
    async with connections(router.port, streams, router.key) as opened:
        before = router.cpu_seconds()
        replies = await asyncio.gather(*(each.send(make_body(PROMPT, events=events)) for each in opened))
        used = router.cpu_seconds() - before
    return used / max(1, sum(reply.events for reply in replies)) * 1e6


async def measure_first_bytes(router: RunningRouter, pod: int, requests: int) -> Latencies:
    """Return what the router adds to the first byte of a stream, at 50 requests/s; with and without it in turns."""
    body = make_body(PROMPT, events=1)
    through: list[float] = []
    direct: list[float] = []
    async with connections(router.port, 1, router.key) as [routed], connections(pod, 1) as [straight]:
        for _ in range(requests):
            for connection, times in ((routed, through), (straight, direct)):
                reply = await connection.send(body)
                times.append(reply.first_byte_seconds * 1e3)
                await asyncio.sleep(FIRST_BYTE_INTERVAL_SECONDS / 2)
    p50, p99 = np.percentile(through, (50, 99)) - np.percentile(direct, (50, 99))
    return Latencies(float(p50), float(p99))


async def measure_faults(router: RunningRouter, pod: StubProcess) -> Faults:
    """Kill, stop and revive a pod under requests."""
    async with connections(router.port, FAULT_STREAMS, router.key) as opened:
        streams = [
            asyncio.ensure_future(each.send(make_body(f"{index} {PROMPT}", events=300)))
            for index, each in enumerate(opened)
        ]
        await asyncio.sleep(1.0)
        pod.kill()
        replies = await _send_all(router, FAULT_REQUESTS)
        failed = sum(not _is_answered(reply) for reply in replies)
        endings = Counter(reply.ending for reply in await asyncio.gather(*streams))
    pod.start()
    revival_seconds = await _wait_for_revival(router, pod)
    pod.send(signal.SIGSTOP)
    try:
        unanswered = sum(not _is_answered(each) for each in await _send_all(router, FAULT_REQUESTS))
    finally:
        pod.send(signal.SIGCONT)
    return Faults(failed, dict(sorted(endings.items())), unanswered, revival_seconds)


async def _send_all(router: RunningRouter, count: int) -> list[Reply]:
    """Send requests with different prompts from ``CLIENTS`` clients, whose lost connections are opened again."""
    numbers = iter(range(count))

    async def send() -> list[Reply]:
        connection, found = await connect(router.port, router.key), []
        for number in numbers:
            if not connection.is_open:
                connection = await connect(router.port, router.key)
            found.append(await connection.send(make_body(f"{number} {PROMPT}")))
        connection.close()
        return found

    return [reply for found in await asyncio.gather(*(send() for _ in range(CLIENTS))) for reply in found]


def _is_answered(reply: Reply) -> bool:
    return reply.status == 200 and reply.ending == "complete"


async def _wait_for_revival(router: RunningRouter, pod: StubProcess) -> float | None:
    """Send requests until one reaches a pod that has started again."""
    began, number = time.monotonic(), 0
    while time.monotonic() - began < REVIVAL_LIMIT_SECONDS:
        async with connections(router.port, 4, router.key) as opened:
            bodies = [make_body(f"revival {number + i} {PROMPT}") for i in range(len(opened))]
            await asyncio.gather(*(each.send(body) for each, body in zip(opened, bodies, strict=True)))
        number += len(bodies)
        if pod.statistics()[0].requests:
            return time.monotonic() - began
        await asyncio.sleep(_REVIVAL_POLL_SECONDS)
    return None


async def measure_routing(
    router: RunningRouter, pods: Sequence[StubProcess], seed: int, *, shared_head: bool
) -> Routing:
    """Send ``TURNS`` prompts of each of ``GROUPS`` groups in random order; a group's prompts begin alike.

    ``shared_head``: all groups' prompts begin alike, too.
    """
    generator = random.Random(seed)
    head = _text(generator, _HEAD_CHARACTERS // 2) if shared_head else ""
    groups = [head + _text(generator, _HEAD_CHARACTERS - len(head)) for _ in range(GROUPS)]
    order = [group for group in groups for _ in range(TURNS)]
    generator.shuffle(order)
    for pod in pods:
        pod.statistics()
    async with connections(router.port, CLIENTS, router.key) as opened:
        todo = iter([make_body(group + _text(generator, 1024)) for group in order])

        async def work(connection: Connection) -> None:
            for body in todo:
                await connection.send(body)

        await asyncio.gather(*(work(each) for each in opened))
    found: list[Statistics] = [each for pod in pods for each in pod.statistics()]
    requests = [each.requests for each in found]
    in_head = _HEAD_CHARACTERS // PROMPT_BLOCK_BYTES
    distinct = GROUPS * in_head if not shared_head else (GROUPS + 1) * in_head // 2
    hits = sum(each.cached for each in found) / (in_head * sum(requests) - distinct)
    return Routing(hits, max(requests) * len(requests) / max(1, sum(requests)))


def _text(generator: random.Random, characters: int) -> str:
    return "".join(generator.choices("abcdefghijklmnopqrstuvwxyz ", k=characters))
