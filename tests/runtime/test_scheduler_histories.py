"""Whole lives of schedulers: random arrivals, aborts, pools and settings; every client gets what it should."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper_engine import continuation, thought
from scheduler_bench import EOS, UNKNOWN, Reply, SchedulerBench, generate

from skiff_runtime.messages import AbortRequest, Finish, GenerateRequest

LIVES = int(os.environ.get("SKIFF_TEST_LIVES", "1500"))


@dataclass(frozen=True)
class Client:
    """One request: when it comes, what it asks, and when it goes away (if it does)."""

    turn: int
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    leaves_after: int | None
    logprobs: int | None
    prompt_logprobs: int | None


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts of which many share a beginning: cuts of few stems, some with an end of their own."""
    stems = [tuple(np.random.default_rng(seed).integers(0, EOS, 40).tolist()) for seed in range(3)]
    tails = st.lists(st.integers(0, 2), max_size=6).map(tuple)
    return st.builds(
        lambda stem, cut, tail: stem[:cut] + tail, st.sampled_from(stems), st.integers(1, 40), tails
    )


clients = st.builds(
    Client,
    turn=st.integers(0, 30),
    prompt=prompts(),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    leaves_after=st.none() | st.none() | st.integers(0, 12),
    logprobs=st.none() | st.none() | st.integers(0, 2),
    prompt_logprobs=st.none() | st.none() | st.none() | st.integers(0, 2),
)
options = st.fixed_dictionaries(
    {
        "num_pages": st.integers(2, 60),
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "max_running_requests": st.integers(1, 6),
        "max_batch_tokens": st.sampled_from([6, 7, 16, 200]),
        "cache": st.sampled_from(["radix", "radix", "naive"]),
        "disable_overlap": st.booleans(),
    }
)


def expected(client: Client) -> tuple[list[int], Finish]:
    tokens = continuation(client.prompt, client.max_tokens)
    if not client.ignore_eos and EOS in tokens:
        return tokens[: tokens.index(EOS) + 1], Finish.STOP
    return tokens, Finish.LENGTH


def judge(client: Client, reply: Reply, kv_tokens: int) -> None:
    """The reply has one end, and the right tokens before it."""
    needed = len(client.prompt) + client.max_tokens
    if needed > kv_tokens:
        assert reply.failed is not None and reply.failed.status == 400 and not reply.tokens
        return
    tokens, finish = expected(client)
    judge_thoughts(client, reply)
    if reply.finish == Finish.ABORT:
        assert client.leaves_after is not None
        assert reply.tokens == tokens[: len(reply.tokens)]
    else:
        assert (reply.tokens, reply.finish) == (tokens, finish)
        assert reply.opened is not None and reply.opened.prompt_tokens == len(client.prompt)


def judge_thoughts(client: Client, reply: Reply) -> None:
    """Each token that was told has its log-probabilities, if they were asked for; so has the prompt."""
    if client.logprobs is None:
        assert reply.thoughts == []
    else:
        sequence, start = [*client.prompt, *reply.tokens], len(client.prompt)
        assert reply.thoughts == [
            (sequence[i], *thought(sequence[:i], sequence[i], client.logprobs))
            for i in range(start, len(sequence))
        ]
    told = len(reply.prompt)
    assert told == 0 if client.prompt_logprobs is None else told == len(client.prompt) or not reply.tokens
    top = client.prompt_logprobs or 0
    for i, each in enumerate(reply.prompt):
        known = thought(client.prompt[:i], client.prompt[i], top) if i else UNKNOWN
        assert each == (client.prompt[i], *known)


def request(uid: int, client: Client) -> GenerateRequest:
    return generate(
        uid,
        client.prompt,
        max_tokens=client.max_tokens,
        ignore_eos=client.ignore_eos,
        logprobs=client.logprobs,
        prompt_logprobs=client.prompt_logprobs,
    )


def live(bench: SchedulerBench, population: list[Client]) -> list[int]:
    """Let all clients come and go; the digest after each turn."""
    digests = []
    for turn in range(45):
        for uid, client in enumerate(population):
            if client.turn == turn:
                bench.put(request(uid, client))
            if client.leaves_after is not None and client.turn + client.leaves_after == turn:
                bench.put(AbortRequest(uid))
        bench.turn()
        digests.append(bench.scheduler.digest)
    bench.finish()
    return digests


@settings(max_examples=LIVES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=options, population=st.lists(clients, min_size=1, max_size=12))
def test_every_client_gets_its_tokens_and_one_end(options: dict[str, Any], population: list[Client]) -> None:
    bench = SchedulerBench(**options)
    live(bench, population)
    for uid, client in enumerate(population):
        judge(client, bench.replies[uid], options["num_pages"] * options["page_size"])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=options, population=st.lists(clients, min_size=1, max_size=12))
def test_two_schedulers_plan_alike(options: dict[str, Any], population: list[Client]) -> None:
    ours, theirs = SchedulerBench(**options), SchedulerBench(**options)
    assert live(ours, population) == live(theirs, population)
    assert ours.replies == theirs.replies


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_pool_evicts_and_retracts_and_loses_nothing(overlap: bool) -> None:
    random = np.random.default_rng(5)
    bench = SchedulerBench(num_pages=30, page_size=2, disable_overlap=not overlap, max_model_len=64)
    stem = random.integers(0, EOS, 12).tolist()
    crowd = {uid: stem + random.integers(0, EOS, uid % 7).tolist() for uid in range(40)}
    bench.put(*(generate(uid, prompt, max_tokens=20) for uid, prompt in crowd.items()))
    bench.finish()
    for uid, prompt in crowd.items():
        assert bench.replies[uid].tokens == continuation(prompt, 20)
    assert bench.total("retracted") > 0
    assert bench.total("evicted_pages") > 0
    assert sum(reply.opened.cached_tokens for reply in bench.replies.values() if reply.opened) > 0
