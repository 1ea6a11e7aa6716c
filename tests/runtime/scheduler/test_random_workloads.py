"""Whole lives of schedulers: random arrivals, aborts, pools and settings; every client gets what it should."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_bench import EOS, UNKNOWN, Reply, SchedulerBench, generate
from simulated_engine import continuation, thought

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.messages import AbortRequest, CompiledGrammar, FinishReason, FlushCache, GenerateRequest
from skiff_runtime.scheduler.step_planner import Planned

FEW_QUEUED = 40
LIVES = int(os.environ.get("SKIFF_TEST_LIVES", "700"))


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
    priority: int
    copies: int
    admitted: int | None
    """How many tokens its grammar admits, if it has one."""


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
    priority=st.integers(-2, 2),
    copies=st.sampled_from([1, 1, 1, 3]),
    admitted=st.none() | st.none() | st.none() | st.integers(0, 24),
)
crowds = st.lists(clients, min_size=1, max_size=12).map(
    lambda crowd: [client for client in crowd for _ in range(client.copies)]
)
flush_turns = st.lists(st.integers(0, 40), max_size=3, unique=True).map(sorted)
options = st.fixed_dictionaries(
    {
        "num_pages": st.integers(2, 60),
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "max_running_requests": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 16, 200]),
        "disable_radix_cache": st.sampled_from([False, False, True]),
        "disable_overlap_schedule": st.booleans(),
        "schedule_policy": st.sampled_from(["fcfs", "lpm"]),
        "max_queued_requests": st.sampled_from([0, 3, 100]),
        "max_queued_tokens": st.sampled_from([FEW_QUEUED, 100_000, 100_000]),
    }
)


def expected(client: Client) -> tuple[list[int], FinishReason]:
    """The whole answer, and its end; ``RUNNING`` where its grammar ends it with an error."""
    tokens, finish = continuation(client.prompt, client.max_tokens), FinishReason.LENGTH
    if not client.ignore_eos and EOS in tokens:
        tokens, finish = tokens[: tokens.index(EOS) + 1], FinishReason.STOP
    if client.admitted is not None and client.admitted < len(tokens):
        return tokens[: client.admitted], FinishReason.RUNNING
    return tokens, finish


def judge(client: Client, reply: Reply, options: dict[str, Any]) -> None:
    """The reply has one end, and the right tokens before it."""
    needed = len(client.prompt) + client.max_tokens
    if needed > options["num_pages"] * options["page_size"]:
        assert reply.failed is not None and reply.failed.status == 400 and not reply.tokens
        return
    if reply.failed is not None and reply.failed.status == 429:
        assert options["max_queued_tokens"] == FEW_QUEUED and reply.opened is None
        return
    tokens, finish = expected(client)
    judge_thoughts(client, reply)
    if reply.failed is not None:
        assert (reply.failed.code, reply.tokens, finish) == ("grammar_stuck", tokens, FinishReason.RUNNING)
    elif reply.finish == FinishReason.ABORT:
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
        priority=client.priority,
        grammar=None if client.admitted is None else CompiledGrammar(b"key", b"%d" % client.admitted),
    )


def live(bench: SchedulerBench, population: list[Client], flushes: list[int]) -> list[int]:
    """Let all clients come and go, and the cache be flushed now and then; the digest after each turn."""
    digests = []
    for turn in range(45):
        for uid, client in enumerate(population):
            if client.turn == turn:
                bench.put(request(uid, client))
            if client.leaves_after is not None and client.turn + client.leaves_after == turn:
                bench.put(AbortRequest(uid))
        if turn in flushes:
            bench.put(FlushCache(turn))
        bench.turn()
        digests.append(bench.scheduler.digest)
    bench.finish()
    assert [flushed.uid for flushed in bench.replies.flushed] == flushes
    return digests


def watch_plans(bench: SchedulerBench) -> None:
    """Let each plan be checked as it is made: no request that decodes is left out of a step, but for the preempted,
    and no step computes more than its budget. So a prompt delays decoding by one step's budget at most. And what
    it sets in the page table is right."""
    batcher, slots = bench.scheduler._batcher, bench.scheduler._slots
    make, table = batcher.plan, np.full_like(slots.pages, -1)

    def plan() -> Planned | None:
        due = np.flatnonzero(slots.decoding).tolist()
        planned = make()
        if planned is None:
            assert not due
            return None
        decoding = planned.step.slots[: planned.step.decode_rows].tolist()
        assert planned.step.lengths[: planned.step.decode_rows].tolist() == [1] * len(decoding)
        assert set(decoding) <= set(due) and len(due) - len(decoding) <= planned.preempted
        assert planned.step.tokens <= bench.config.max_num_batched_tokens
        judge_cells(bench, planned, table)
        return planned

    batcher.plan = plan  # type: ignore[method-assign]


def judge_cells(bench: SchedulerBench, planned: Planned, table: Int32) -> None:
    """The plan makes of ``table``, the engine's, the pages that the requests hold.

    But what this step computes though the cache has it, it still writes to pages of its own.
    """
    step, slots = planned.step, bench.scheduler._slots
    table[step.page_slots, step.page_columns] = step.page_ids
    expected = slots.pages.copy()
    for (request, columns, _), own in zip(
        bench.scheduler._batcher._rewrites.cells, planned.duplicates, strict=True
    ):
        expected[request.slot, columns] = own
    for request in slots.requests():
        row = slice(slots.held[request.slot])
        assert table[request.slot, row].tolist() == expected[request.slot, row].tolist()


def retract_after(bench: SchedulerBench, steps: list[int]) -> None:
    """Let memory seem short after so many steps, until a request has been preempted, which then may come back at once."""
    batcher, slots = bench.scheduler._batcher, bench.scheduler._slots
    is_out_of_pages, preempt, due = batcher.is_out_of_pages, batcher._retract, set(steps)

    def seems_starved() -> bool:
        return is_out_of_pages() or (len(bench.engine.plans) in due and slots.running > 0)

    def retract_once() -> None:
        due.discard(len(bench.engine.plans))
        preempt()

    batcher.is_out_of_pages = seems_starved  # type: ignore[method-assign]
    batcher._retract = retract_once  # type: ignore[method-assign]


@settings(max_examples=LIVES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=options, population=crowds, flushes=flush_turns)
def test_every_client_gets_its_tokens_and_one_end(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    bench = SchedulerBench(**options)
    watch_plans(bench)
    live(bench, population, flushes)
    for uid, client in enumerate(population):
        judge(client, bench.replies[uid], options)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=options, population=crowds, steps=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_a_retraction_after_any_step_loses_nothing(
    options: dict[str, Any], population: list[Client], steps: list[int]
) -> None:
    bench = SchedulerBench(**options)
    retract_after(bench, steps)
    watch_plans(bench)
    live(bench, population, [])
    for uid, client in enumerate(population):
        judge(client, bench.replies[uid], options)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=options, population=crowds, flushes=flush_turns)
def test_two_schedulers_plan_alike(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    ours, theirs = SchedulerBench(**options), SchedulerBench(**options)
    assert live(ours, population, flushes) == live(theirs, population, flushes)
    assert ours.replies == theirs.replies


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_pool_evicts_and_retracts_and_loses_nothing(overlap: bool) -> None:
    random = np.random.default_rng(5)
    bench = SchedulerBench(num_pages=30, page_size=2, disable_overlap_schedule=not overlap, max_model_len=64)
    stem = random.integers(0, EOS, 12).tolist()
    crowd = {uid: stem + random.integers(0, EOS, uid % 7).tolist() for uid in range(40)}
    bench.put(*(generate(uid, prompt, max_tokens=20) for uid, prompt in crowd.items()))
    bench.finish()
    for uid, prompt in crowd.items():
        assert bench.replies[uid].tokens == continuation(prompt, 20)
    assert bench.total("preempted") > 0
    assert bench.total("evicted_pages") > 0
    assert sum(reply.opened.cached_tokens for reply in bench.replies.values() if reply.opened) > 0
