"""The split of requests between a canary and the old revision."""

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from fake_pod import PodRequest, json_response
from hypothesis import given
from hypothesis import strategies as st
from routers import routed, run

from skiff_router.canary import CanarySplit, identify_conversation
from skiff_router.discovery import Discovery, InferenceService
from skiff_router.endpoints import Registry
from skiff_router.request import RoutedBody, read_body

REVISION = "6f0c4a1b2d"


def split(weight: int = 25, **changes: Any) -> CanarySplit:
    fields = {"revision": REVISION, "pods": frozenset({"new"}), "weight": weight, **changes}
    return CanarySplit(**fields)


def body(**fields: Any) -> RoutedBody:
    return read_body(json.dumps({"model": "m", **fields}).encode())


def chat(*turns: str, **fields: Any) -> RoutedBody:
    roles = ("system", *("user", "assistant") * len(turns))
    return body(messages=[{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)], **fields)


def takes(canary: CanarySplit, fields: RoutedBody, key: bytes = b"") -> bool:
    return canary.takes([], fields, key)


@pytest.mark.parametrize("weight", [1, 10, 50, 99])
def test_weight_is_the_share_of_conversations(weight: int) -> None:
    count = 4000
    taken = sum(takes(split(weight), chat("Be brief.", f"Question {i}")) for i in range(count))
    deviation = (count * weight / 100 * (1 - weight / 100)) ** 0.5
    assert abs(taken - count * weight / 100) < 4 * deviation


@given(st.text(), st.integers(1, 98))
def test_larger_weight_keeps_every_conversation_of_the_canary(question: str, weight: int) -> None:
    conversation = chat("Be brief.", question)
    assert not takes(split(weight), conversation) or takes(split(weight + 1), conversation)


@given(st.text(), st.lists(st.text(), max_size=4), st.sampled_from(["messages", "input"]))
def test_conversation_stays_with_one_revision(question: str, later: list[str], field: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    more = [{"role": "assistant", "content": text} for text in later]
    first, next_one = body(**{field: turns}), body(**{field: [*turns, *more]})
    assert identify_conversation(first) == identify_conversation(next_one)


def test_conversations_with_one_system_prompt_differ() -> None:
    assert identify_conversation(chat("Be brief.", "a")) != identify_conversation(chat("Be brief.", "b"))
    assert identify_conversation(body(instructions="Be brief.", input="a")) != identify_conversation(
        body(instructions="Be brief.", input="b")
    )


def test_end_user_and_cache_key_name_a_conversation() -> None:
    assert identify_conversation(chat("", "a", user="u1")) == identify_conversation(chat("", "b", user="u1"))
    assert identify_conversation(chat("", "a", prompt_cache_key="k")) == b'"k"'


@pytest.mark.parametrize("fields", [{"messages": 3}, {"messages": [3]}, {"prompt": None}, {}, {"input": "a"}])
def test_any_body_has_an_identity(fields: dict[str, Any]) -> None:
    assert takes(split(99), body(**fields)) in (True, False)


def test_every_revision_meets_other_conversations() -> None:
    other = split(50, revision="another")
    conversations = [chat("", str(i)) for i in range(200)]
    both = sum(takes(split(50), each) and takes(other, each) for each in conversations)
    assert 20 < both < 80


def test_keys_stay_with_one_revision() -> None:
    canary = split(50, sticky_by="Key")
    keys = [str(i).encode() for i in range(64)]
    chosen = [takes(canary, chat("", "a"), key) for key in keys]
    assert chosen == [takes(canary, chat("", "b"), key) for key in keys]
    assert 10 < sum(chosen) < 54


def test_header_alone_decides() -> None:
    canary = split(99, header=(b"x-canary", b"yes"))
    conversation = chat("", "a")
    assert canary.takes([(b"x-canary", b"yes")], conversation, b"")
    assert not canary.takes([(b"x-canary", b"no")], conversation, b"")
    assert not canary.takes([], conversation, b"")


def service(**canary: object) -> InferenceService:
    fields = {
        "metadata": {"name": "llama", "namespace": "shop"},
        "status": {"canary": canary} if canary else {},
    }
    return msgspec.convert(fields, InferenceService)


def test_canary_is_read_from_the_status() -> None:
    registry = Registry()
    discovery = Discovery(registry)
    discovery.list_services([service(revision=REVISION, weight=5, pods=["new"])])
    assert registry.find("llama").backend.canary == split(5)
    header = {"name": "X-Canary", "value": "yes"}
    discovery.change_service(
        "MODIFIED", service(revision=REVISION, header=header, stickyBy="Key", pods=["new"])
    )
    assert registry.find("llama").backend.canary == split(0, header=(b"x-canary", b"yes"), sticky_by="Key")
    discovery.change_service("MODIFIED", service(revision=REVISION, weight=5, pods=[]))
    assert registry.find("llama").backend.canary is None
    discovery.change_service("MODIFIED", service(revision=REVISION, weight=5, pods=["new"]))
    discovery.change_service("MODIFIED", service())
    assert registry.find("llama").backend.canary is None


async def _answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(b"{}"))


def test_requests_are_split_between_pods_and_fall_back_to_the_other_revision() -> None:
    async def scenario() -> None:
        async with routed(_answer, _answer, _answer) as (running, started):
            backend = running.server._registry.find("a").backend
            new = started[2]
            backend.canary = split(50, pods=frozenset({str(new.address)}))
            ask = [{"model": "a", "messages": [{"role": "user", "content": str(i)}]} for i in range(40)]
            expected = sum(takes(backend.canary, body(messages=each["messages"])) for each in ask)
            for each in ask:
                assert (await running.post("/v1/chat/completions", each)).status_code == 200
            assert 0 < expected < 40
            assert len(new.requests) == expected
            metrics = await running.metrics()
            chosen = {
                name: metrics[f'skiff_router_canary_choices_total{{model="a",revision="{name}"}}']
                for name in ("canary", "stable")
            }
            assert chosen == {"canary": expected, "stable": 40 - expected}
            await new.stop()
            answers: Counter[int] = Counter()
            for each in ask:
                answers[(await running.post("/v1/chat/completions", each)).status_code] += 1
            assert answers == {200: 40}

    run(scenario())
