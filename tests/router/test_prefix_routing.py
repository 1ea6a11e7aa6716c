"""The router in front of real runtimes on the CPU: requests go to the pod that has their prefix, by its own count of hits."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from routers import RunningRouter, make_config, router, until
from service import Service, running_service, wait_ready

from skiff_router.upstream import Address
from skiff_runtime.contract import METRIC_PREFIX_CACHE_HITS, METRIC_PREFIX_CACHE_QUERIES
from skiff_runtime.prompt_blocks import PROMPT_BLOCK_BYTES

pytestmark = pytest.mark.integration

PODS = 3
GROUPS = 5
ROUNDS = 3
LIMIT_SECONDS = 240
WORDS = ("river", "stone", "lamp", "orchard", "winter", "copper", "sail")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods share this machine: one that is late by some heartbeats is not passed over."""
    monkeypatch.setattr("skiff_router.event_watcher.SILENCE_SECONDS", 10.0)


@pytest.fixture(scope="module")
def services() -> Iterator[list[Service]]:
    with ExitStack() as stack:
        flags = ("--max-total-tokens", "65536", "--drain-timeout-seconds", "20")
        started = [stack.enter_context(running_service("demo://", *flags, ready=False)) for _ in range(PODS)]
        for service in started:
            service.url = wait_ready(service)
        yield started


def head(group: int) -> str:
    """Return a text of two blocks, and some, that begins unlike those of other groups."""
    text = f"{WORDS[group]} {group}: " + f"the {WORDS[group]} of the {WORDS[group - 1]} is old, and "
    return (text * 200)[: 2 * PROMPT_BLOCK_BYTES + 50]


def addresses(services: Sequence[Service]) -> tuple[Address, ...]:
    urls = [urlsplit(service.url) for service in services]
    return tuple(Address(str(url.hostname), int(url.port or 0)) for url in urls)


def counters(services: Sequence[Service], name: str) -> list[float]:
    return [service.metric(name) for service in services]


async def follow(running: RunningRouter) -> None:
    async def known() -> bool:
        return all(each.pod.load is not None for each in running.server._registry.backends[0].endpoints)

    await until(known)


async def ask(running: RunningRouter, group: int, question: int) -> None:
    body = {"model": "skiff-demo", "prompt": f"{head(group)} question {question}", "max_tokens": 1}
    reply = await running.post("/v1/completions", body, timeout=LIMIT_SECONDS)
    assert reply.status_code == 200, reply.text


def test_prefixes_find_their_pods_and_a_second_router_knows_them(services: list[Service]) -> None:
    async def test() -> None:
        config = make_config(
            {"skiff-demo": addresses(services)}, policy="prefix", first_byte_timeout_seconds=LIMIT_SECONDS
        )
        async with router(config) as first:
            await follow(first)
            for question in range(ROUNDS):
                await asyncio.gather(*(ask(first, group, question) for group in range(GROUPS)))
                await asyncio.sleep(0.3)
            queries = counters(services, METRIC_PREFIX_CACHE_QUERIES)
            hits = counters(services, METRIC_PREFIX_CACHE_HITS)
            assert min(queries) > 0, "every pod got a share"
            # All but the first request of each group finds its head; questions and the last block are computed.
            assert sum(hits) / sum(queries) > 0.75 * (ROUNDS - 1) / ROUNDS, (queries, hits)
            async with router(config) as second:
                await follow(second)
                await asyncio.gather(*(ask(second, group, ROUNDS) for group in range(GROUPS)))
            more_queries = sum(counters(services, METRIC_PREFIX_CACHE_QUERIES)) - sum(queries)
            more_hits = sum(counters(services, METRIC_PREFIX_CACHE_HITS)) - sum(hits)
            assert more_hits / more_queries > 0.75, "a new router knows from the snapshots what pods hold"

    asyncio.run(asyncio.wait_for(test(), LIMIT_SECONDS))


def test_pod_that_drains_gets_nothing_and_no_request_fails(services: list[Service]) -> None:
    async def test() -> None:
        async with router(
            make_config(
                {"skiff-demo": addresses(services)}, policy="prefix", first_byte_timeout_seconds=LIMIT_SECONDS
            )
        ) as running:
            await follow(running)
            services[0].process.send_signal(signal.SIGTERM)
            for question in range(10, 13):
                await asyncio.gather(*(ask(running, group, question) for group in range(GROUPS)))
            states = (await running.client.get("/v1/models")).json()["data"][0]["pods"]
            assert states["available"] == PODS - 1
            assert (await running.metrics()).get(
                'skiff_router_requests_total{code="200",model="skiff-demo"}'
            ) == 3 * GROUPS
        assert services[0].wait_exit() == 0

    asyncio.run(asyncio.wait_for(test(), LIMIT_SECONDS))
