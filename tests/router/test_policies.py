"""The choice of a pod: where the prefix is, unless the wait there costs more than to compute it elsewhere."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fake_pod import SNAPSHOT, STREAM_HEAD, PodRequest, chunk, event, json_response, pods
from msgspec.structs import replace
from routers import make_config, router, until

from skiff_router.endpoints import Endpoint
from skiff_router.pod_state import Prompt
from skiff_router.policies import PrefixAware
from skiff_router.upstream import Address
from skiff_runtime.api.http.auth import derive_cache_namespace
from skiff_runtime.prompt_blocks import hash_body
from skiff_runtime.state_events import PodLoad

IDLE = PodLoad(
    max_requests=1000,
    max_running=100,
    max_step_tokens=2048,
    step_seconds=0.01,
    prefill_token_seconds=1e-4,
    bytes_per_token=4.0,
)
HEAD = list(range(8))
"""Blocks of 2,048 tokens, which take 0.2 s to compute."""


def endpoint(name: str, load: PodLoad | None = IDLE, blocks: Sequence[int] = ()) -> Endpoint:
    made = Endpoint(name, Address(name, 1))
    if load is not None:
        made.pod.apply(replace(SNAPSHOT, load=load, prompt_blocks=list(blocks)), 0.0)
    return made


def prompt(*blocks: int) -> Prompt:
    return Prompt(blocks, 1024 * len(blocks))


def choices(endpoints: Sequence[Endpoint], *prompts: Prompt, at: float = 0.0, seed: int = 1) -> list[str]:
    policy = PrefixAware(seed)
    names = []
    for number, each in enumerate(prompts):
        chosen = policy.choose(endpoints, each, at)
        chosen.pod.record_prompt(at, each, number)
        names.append(chosen.name)
    return names


def test_work_that_was_sent_is_done_in_time() -> None:
    """A prompt that no report includes keeps its pod busy for as long as it takes to compute, and not until the report."""
    pod = endpoint("a", blocks=HEAD).pod
    pod.record_request(0.0, 1000, 1)
    done = 1000 * IDLE.prefill_token_seconds + 1000 / IDLE.max_step_tokens * IDLE.step_seconds
    assert pod.free_at == pytest.approx(done)
    pod.record_request(0.01, 1000, 2)
    assert pod.free_at == pytest.approx(2 * done), "one after the other"
    endpoints = [endpoint("a", blocks=HEAD), endpoint("b", blocks=HEAD[:6])]
    endpoints[0].pod.record_request(0.0, 1000, 1)
    assert choices(endpoints, prompt(*HEAD), at=0.01) == ["b"]
    assert choices(endpoints, prompt(*HEAD), at=done) == ["a"]


def test_prompt_goes_where_most_of_it_is_cached() -> None:
    endpoints = [endpoint("a"), endpoint("b", blocks=HEAD[:3]), endpoint("c", blocks=HEAD[:6])]
    assert choices(endpoints, prompt(*HEAD)) == ["c"]
    assert choices(endpoints, prompt(*HEAD[:3], 77)) in (["b"], ["c"])


def test_queue_that_costs_more_than_the_prefix_sends_it_elsewhere() -> None:
    busy = [
        endpoint("a"),
        endpoint("b", replace(IDLE, queued_tokens=4000, waiting=4, requests=4), blocks=HEAD),
    ]
    assert choices(busy, prompt(*HEAD)) == ["a"]
    assert choices(
        [busy[0], endpoint("b", replace(IDLE, queued_tokens=500), blocks=HEAD)], prompt(*HEAD)
    ) == ["b"]


def test_pod_without_a_free_slot_costs_the_time_until_one_is_free() -> None:
    full = replace(IDLE, running=100, requests=100, finish_seconds=0.5)
    assert choices([endpoint("a"), endpoint("b", full, blocks=HEAD)], prompt(*HEAD)) == ["a"]


def test_hot_prefix_spreads() -> None:
    """A burst goes to the pod that has the prefix until its queue is as long as the prefill elsewhere."""
    endpoints = [endpoint(name, blocks=HEAD if name == "a" else ()) for name in "abcd"]
    names = choices(endpoints, *(prompt(*HEAD, 100 + i, 200 + i) for i in range(40)))
    counts = [names.count(name) for name in "abcd"]
    assert counts[0] > max(counts[1:]) and min(counts) >= 3


def test_head_that_all_share_does_not_send_all_to_one_pod() -> None:
    endpoints = [endpoint(name, blocks=HEAD[:1]) for name in "abcd"]
    names = choices(endpoints, *(prompt(HEAD[0], *range(100 * i, 100 * i + 7)) for i in range(1, 41)))
    assert max(names.count(name) for name in "abcd") <= 12


def test_new_pod_gets_what_is_new_at_once() -> None:
    loaded = replace(IDLE, running=50, requests=50, prefill_tokens=3000)
    endpoints = [
        endpoint("a", loaded),
        endpoint("b", loaded),
        endpoint("new", replace(IDLE, step_seconds=0.0, prefill_token_seconds=0.0)),
    ]
    assert choices(endpoints, prompt(500, 501)) == ["new"]


def test_routers_agree_from_events_alone() -> None:
    endpoints = [endpoint("a"), endpoint("b", blocks=HEAD), endpoint("c")]
    assert {choices(endpoints, prompt(*HEAD), seed=seed)[0] for seed in range(20)} == {"b"}


def test_equal_pods_get_equal_shares() -> None:
    endpoints = [endpoint(name) for name in "abcd"]
    names = choices(endpoints, *(prompt() for _ in range(400)))
    assert all(70 <= names.count(name) <= 130 for name in "abcd")


def test_pods_without_events_share_by_requests_in_flight() -> None:
    endpoints = [endpoint(name, None) for name in "ab"]
    endpoints[0].in_flight = 3
    assert choices(endpoints, prompt(1, 2), prompt(3)) == ["b", "b"]


@pytest.mark.parametrize("isolated", [False, True])
def test_request_reaches_the_pod_that_reports_its_blocks(isolated: bool) -> None:
    """The router and the pods name the blocks of a body alike, over HTTP, with salts and isolated keys."""
    body: dict[str, Any] = {
        "model": "a",
        "messages": [{"role": "user", "content": "the same words " * 400}],
        "cache_salt": "salt",
    }
    digest = hashlib.sha256(b"secret").digest() if isolated else b""
    hashed = hash_body(json.dumps(body).encode(), derive_cache_namespace(digest, "salt"))
    assert hashed is not None
    blocks = hashed.names()

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b"{}"))

    async def test() -> None:
        async with pods(answer, answer, answer) as started:
            for pod in started:
                pod.reports = True
                pod.snapshot = replace(SNAPSHOT, load=IDLE, isolates_keys=isolated)
            started[1].snapshot = replace(started[1].snapshot, prompt_blocks=blocks)
            config = make_config({"a": tuple(pod.address for pod in started)}, policy="prefix")
            async with router(config) as running:

                async def known() -> bool:
                    endpoints = running.server._registry.backends[0].endpoints
                    return all(each.pod.load is not None for each in endpoints)

                await until(known)
                headers = {"authorization": "Bearer secret"}
                for _ in range(6):
                    await running.post("/v1/chat/completions", body, headers=headers)
                assert [len(pod.requests) for pod in started] == [0, 6, 0]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_expected_and_actual_cached_tokens_are_counted_where_both_are_known() -> None:
    """Not for a pod without events, nor for a response whose tokens are estimated."""
    body: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "the same words " * 400}]}
    hashed = hash_body(json.dumps(body).encode(), b"")
    assert hashed is not None
    counts = b"\r\nx-skiff-usage: prompt=1500, cached=700, completion=3\r\n\r\n"

    async def counted(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b"{}").replace(b"\r\n\r\n", counts))

    async def uncounted(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        if request.body and json.loads(request.body)["model"] == "b":
            writer.write(json_response(b"{}").replace(b"\r\n\r\n", counts))
            return
        writer.write(STREAM_HEAD + event("one") + chunk(b""))

    async def test() -> None:
        async with pods(counted, uncounted, uncounted) as (known, estimated, silent):
            for pod, model in ((known, "a"), (estimated, "c")):
                pod.reports = True
                blocks = hashed.names()[:3]
                pod.snapshot = replace(SNAPSHOT, model=model, load=IDLE, prompt_blocks=blocks)
            backends = {"a": (known.address,), "b": (silent.address,), "c": (estimated.address,)}
            async with router(make_config(backends, policy="prefix")) as running:

                async def followed() -> bool:
                    loads = [each.endpoints[0].pod.load for each in running.server._registry.backends]
                    return loads.count(None) == 1

                await until(followed)
                for model in "abc":
                    assert (
                        await running.post("/v1/chat/completions", {**body, "model": model})
                    ).status_code == 200
                metrics = await running.metrics()
                found = {name: value for name, value in metrics.items() if "prefix_tokens_total" in name}
                assert found == {
                    'skiff_router_prefix_tokens_total{kind="expected",model="a"}': 3 * 256,
                    'skiff_router_prefix_tokens_total{kind="actual",model="a"}': 700,
                }

    asyncio.run(asyncio.wait_for(test(), 30))
