"""Random arrivals, aborts, pool sizes and settings: every client gets exactly its tokens and one end."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from histories import examples
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import EOS, UNPREDICTED, Reply, SchedulerBench, generate
from simulated_engine import continuation, token_logprobs

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.messages import AbortRequest, CompiledGrammar, FinishReason, FlushCache, GenerateRequest
from skiff_runtime.scheduler.step_planner import PlannedStep

FEW_QUEUED = 40
FULL = int(os.environ.get("SKIFF_TEST_LIVES", "700"))
"""Lives of a scheduler in ``make soak``; in ``make test`` there are 100."""


@dataclass(frozen=True)
class Client:
    """One request: the turn in which it arrives, its parameters, and the turn in which it is aborted, if it is."""

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
    """Output tokens that its grammar admits, if it has one."""


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Draw prompts that often share a prefix: cuts of a few stems, some with a tail of their own."""
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
    """Return the whole answer and its finish reason; ``RUNNING`` where its grammar ends it with an error."""
    tokens, finish = continuation(client.prompt, client.max_tokens), FinishReason.LENGTH
    if not client.ignore_eos and EOS in tokens:
        tokens, finish = tokens[: tokens.index(EOS) + 1], FinishReason.STOP
    if client.admitted is not None and client.admitted < len(tokens):
        return tokens[: client.admitted], FinishReason.RUNNING
    return tokens, finish


def check_reply(client: Client, reply: Reply, options: dict[str, Any]) -> None:
    """Check that the reply has one end, and the right tokens before it."""
    needed = len(client.prompt) + client.max_tokens
    if needed > options["num_pages"] * options["page_size"]:
        assert reply.failed is not None and reply.failed.status == 400 and not reply.tokens
        return
    if reply.failed is not None and reply.failed.status == 429:
        assert options["max_queued_tokens"] == FEW_QUEUED and reply.opened is None
        return
    tokens, finish = expected(client)
    check_logprobs(client, reply)
    if reply.failed is not None:
        assert (reply.failed.code, reply.tokens, finish) == ("grammar_stuck", tokens, FinishReason.RUNNING)
    elif reply.finish == FinishReason.ABORT:
        assert client.leaves_after is not None
        assert reply.tokens == tokens[: len(reply.tokens)]
    else:
        assert (reply.tokens, reply.finish) == (tokens, finish)
        assert reply.opened is not None and reply.opened.prompt_tokens == len(client.prompt)


def check_logprobs(client: Client, reply: Reply) -> None:
    """Check the log-probabilities of each token and of the prompt, where they are requested."""
    if client.logprobs is None:
        assert reply.logprobs == []
    else:
        sequence, start = [*client.prompt, *reply.tokens], len(client.prompt)
        assert reply.logprobs == [
            (sequence[i], *token_logprobs(sequence[:i], sequence[i], client.logprobs))
            for i in range(start, len(sequence))
        ]
    sent = len(reply.prompt_logprobs)
    assert sent == 0 if client.prompt_logprobs is None else sent == len(client.prompt) or not reply.tokens
    top = client.prompt_logprobs or 0
    for i, each in enumerate(reply.prompt_logprobs):
        predicted = token_logprobs(client.prompt[:i], client.prompt[i], top) if i else UNPREDICTED
        assert each == (client.prompt[i], *predicted)


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


def run_clients(bench: SchedulerBench, population: list[Client], flushes: list[int]) -> list[int]:
    """Run all clients, with flushes of the cache in some turns; return the lockstep checksum after each turn."""
    checksums = []
    for turn in range(45):
        for uid, client in enumerate(population):
            if client.turn == turn:
                bench.put(request(uid, client))
            if client.leaves_after is not None and client.turn + client.leaves_after == turn:
                bench.put(AbortRequest(uid))
        if turn in flushes:
            bench.put(FlushCache(turn))
        bench.turn()
        checksums.append(bench.scheduler.checksum)
    bench.finish()
    assert [flushed.uid for flushed in bench.replies.flushed] == flushes
    return checksums


def watch_plans(bench: SchedulerBench) -> None:
    """Check each plan as it is made.

    Every decoding request that is not preempted has a row, and no step exceeds its token budget: so a prompt delays
    decoding by one step's budget at most. The page-table cells that the plan sets are right.
    """
    planner, slots = bench.scheduler._planner, bench.scheduler._slots
    make, table = planner.plan, np.full_like(slots.pages, -1)

    def plan() -> PlannedStep | None:
        due = np.flatnonzero(slots.decoding).tolist()
        planned = make()
        if planned is None:
            assert not due
            return None
        decoding = planned.step.slots[: planned.step.decode_rows].tolist()
        assert planned.step.lengths[: planned.step.decode_rows].tolist() == [1] * len(decoding)
        assert set(decoding) <= set(due) and len(due) - len(decoding) <= planned.preempted
        assert planned.step.num_tokens <= bench.config.max_num_batched_tokens
        check_cells(bench, planned, table)
        return planned

    planner.plan = plan  # type: ignore[method-assign]


def check_cells(bench: SchedulerBench, planned: PlannedStep, table: Int32) -> None:
    """Apply the plan to ``table``, the engine's page table, and check it against the pages of the requests.

    Pages that this step computes although the cache has them are still the requests' own.
    """
    step, slots = planned.step, bench.scheduler._slots
    table[step.page_slots, step.page_columns] = step.page_ids
    expected = slots.pages.copy()
    for (request, columns, _), own in zip(
        bench.scheduler._planner._fixups.pending, planned.duplicates, strict=True
    ):
        expected[request.slot, columns] = own
    for request in slots.requests():
        row = slice(slots.num_pages[request.slot])
        assert table[request.slot, row].tolist() == expected[request.slot, row].tolist()


def preempt_after(bench: SchedulerBench, steps: list[int]) -> None:
    """Simulate a lack of pages after these numbers of steps, until a request is preempted; it may return at once."""
    planner, slots = bench.scheduler._planner, bench.scheduler._slots
    is_out_of_pages, preempt, due = planner.is_out_of_pages, planner._preempt, set(steps)

    def seems_out_of_pages() -> bool:
        return is_out_of_pages() or (len(bench.engine.plans) in due and slots.num_running > 0)

    def preempt_once() -> None:
        due.discard(len(bench.engine.plans))
        preempt()

    planner.is_out_of_pages = seems_out_of_pages  # type: ignore[method-assign]
    planner._preempt = preempt_once  # type: ignore[method-assign]


LIVES = given(options=options, population=crowds, flushes=flush_turns)
LIVES_WITH_PREEMPTION = given(
    options=options, population=crowds, steps=st.lists(st.integers(1, 30), min_size=1, max_size=8)
)


def check_life(options: dict[str, Any], population: list[Client], flushes: list[int]) -> None:
    bench = SchedulerBench(**options)
    watch_plans(bench)
    run_clients(bench, population, flushes)
    for uid, client in enumerate(population):
        check_reply(client, bench.replies[uid], options)


@examples(100)
@LIVES
def test_every_client_gets_its_tokens_and_one_end(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    check_life(options, population, flushes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(FULL)
@LIVES
def test_every_client_gets_its_tokens_and_one_end_at_length(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    check_life(options, population, flushes)


def check_preemption(options: dict[str, Any], population: list[Client], steps: list[int]) -> None:
    bench = SchedulerBench(**options)
    preempt_after(bench, steps)
    watch_plans(bench)
    run_clients(bench, population, [])
    for uid, client in enumerate(population):
        check_reply(client, bench.replies[uid], options)


@examples(30)
@LIVES_WITH_PREEMPTION
def test_preemption_after_any_step_loses_nothing(
    options: dict[str, Any], population: list[Client], steps: list[int]
) -> None:
    check_preemption(options, population, steps)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(200)
@LIVES_WITH_PREEMPTION
def test_preemption_after_any_step_loses_nothing_at_length(
    options: dict[str, Any], population: list[Client], steps: list[int]
) -> None:
    check_preemption(options, population, steps)


def check_lockstep(options: dict[str, Any], population: list[Client], flushes: list[int]) -> None:
    ours, theirs = SchedulerBench(**options), SchedulerBench(**options)
    assert run_clients(ours, population, flushes) == run_clients(theirs, population, flushes)
    assert ours.replies == theirs.replies


@examples(20)
@LIVES
def test_two_schedulers_plan_in_lockstep(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    check_lockstep(options, population, flushes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(100)
@LIVES
def test_two_schedulers_plan_in_lockstep_at_length(
    options: dict[str, Any], population: list[Client], flushes: list[int]
) -> None:
    check_lockstep(options, population, flushes)


@pytest.mark.parametrize("overlap", [True, False])
def test_small_pool_evicts_and_preempts_without_losing_tokens(overlap: bool) -> None:
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
