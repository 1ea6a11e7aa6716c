"""Random histories of loads, unloads, requests and aborts: every client gets the tokens of its own adapter and one end."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from histories import examples
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import EOS, Reply, SchedulerBench, generate, load
from simulated_engine import continuation

from skiff_runtime.messages import AbortRequest, AdapterLoaded, AdapterRefused, FinishReason, UnloadAdapter

FULL = int(os.environ.get("SKIFF_TEST_LIVES", "700"))
"""Histories in ``make soak``; in ``make test`` there are 100."""
NUM_ADAPTERS = 5
TURNS = 40


@dataclass(frozen=True)
class AdapterLife:
    """The turns in which an adapter is loaded and unloaded, if it is, and those between which its files are unreadable."""

    loaded: int
    unloaded: int | None
    unreadable: tuple[int, int]


@dataclass(frozen=True)
class Client:
    """One request: its turn, its adapter (0 for the base model), its parameters, and when it is aborted, if it is."""

    turn: int
    adapter_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    leaves_after: int | None


@dataclass
class Outcome:
    """The request was sent; its adapter was unloaded by then."""

    sent: bool = False
    was_unloaded: bool = False


stems = [tuple(np.random.default_rng(seed).integers(0, EOS, 20).tolist()) for seed in range(2)]
lives = st.lists(
    st.builds(
        AdapterLife,
        loaded=st.integers(0, 12),
        unloaded=st.none() | st.integers(13, 35),
        unreadable=st.just((99, 99)) | st.just((99, 99)) | st.tuples(st.integers(0, 20), st.integers(0, 30)),
    ),
    min_size=NUM_ADAPTERS,
    max_size=NUM_ADAPTERS,
)
crowds = st.lists(
    st.builds(
        Client,
        turn=st.integers(4, 30),
        adapter_id=st.integers(0, NUM_ADAPTERS),
        prompt=st.builds(lambda stem, cut: stem[:cut], st.sampled_from(stems), st.integers(1, 20)),
        max_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        leaves_after=st.none() | st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=20,
)
options = st.fixed_dictionaries(
    {
        "num_pages": st.integers(12, 60),
        "max_loras": st.integers(1, 3),
        "max_cpu_loras": st.integers(3, 4),
        "max_running_requests": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 16, 200]),
        "disable_radix_cache": st.sampled_from([False, False, True]),
        "disable_overlap_schedule": st.booleans(),
        "schedule_policy": st.sampled_from(["fcfs", "lpm"]),
    }
)
read_turns = st.integers(1, 5)


def run(
    bench: SchedulerBench, adapters: list[AdapterLife], crowd: list[Client]
) -> tuple[list[Outcome], list[int]]:
    """Run a history; return what was sent, and the lockstep checksum after each turn.

    As the API does, it sends a request only once its adapter is reported as loaded. It may unload one that requests use.
    """
    outcomes = [Outcome() for _ in crowd]
    checksums: list[int] = []
    unloaded: set[int] = set()
    for turn in range(TURNS):
        bench.store.faulty = {
            each for each, life in enumerate(adapters, 1) if life.unreadable[0] <= turn < life.unreadable[1]
        }
        known = {each.adapter_id for each in bench.replies.adapters if isinstance(each, AdapterLoaded)}
        for adapter_id, life in enumerate(adapters, 1):
            if life.loaded == turn:
                bench.put(load(adapter_id))
            if life.unloaded == turn and adapter_id in known:
                bench.put(UnloadAdapter(adapter_id))
                unloaded.add(adapter_id)
        for uid, (client, outcome) in enumerate(zip(crowd, outcomes, strict=True)):
            if client.turn == turn and client.adapter_id in {0, *known}:
                outcome.sent, outcome.was_unloaded = True, client.adapter_id in unloaded
                bench.put(
                    generate(
                        uid,
                        client.prompt,
                        max_tokens=client.max_tokens,
                        priority=client.priority,
                        adapter_id=client.adapter_id,
                    )
                )
            if outcome.sent and client.leaves_after is not None and client.turn + client.leaves_after == turn:
                bench.put(AbortRequest(uid))
        bench.turn()
        checksums.append(bench.scheduler.checksum)
    bench.store.faulty = set()
    bench.finish()
    return outcomes, checksums


def check_reply(client: Client, outcome: Outcome, reply: Reply, life: AdapterLife | None) -> None:
    """Check that a request that was sent has one end, and before it tokens of its own adapter alone."""
    tokens = continuation(client.prompt, client.max_tokens, client.adapter_id)
    assert reply.has_ended
    if outcome.was_unloaded:
        assert reply.failed is not None and reply.failed.status == 404 and not reply.tokens
    elif reply.failed is not None:
        assert reply.failed.status == 500 and life is not None and life.unreadable != (99, 99)
    elif reply.finish == FinishReason.ABORT:
        assert client.leaves_after is not None and reply.tokens == tokens[: len(reply.tokens)]
    else:
        assert (reply.tokens, reply.finish) == (tokens, FinishReason.LENGTH)


HISTORIES = given(options=options, adapters=lives, crowd=crowds, turns=read_turns)


def check_history(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    bench = SchedulerBench(enable_lora=True, **options)
    bench.store.turns = turns
    outcomes, _ = run(bench, adapters, crowd)
    for uid, (client, outcome) in enumerate(zip(crowd, outcomes, strict=True)):
        if outcome.sent:
            life = adapters[client.adapter_id - 1] if client.adapter_id else None
            check_reply(client, outcome, bench.replies[uid], life)
        else:
            assert uid not in bench.replies
    assert sorted(each.adapter_id for each in bench.replies.adapters) == list(range(1, NUM_ADAPTERS + 1))
    refused = [each for each in bench.replies.adapters if isinstance(each, AdapterRefused)]
    assert all(adapters[each.adapter_id - 1].unreadable != (99, 99) for each in refused)
    check_nothing_is_left(bench)


def check_nothing_is_left(bench: SchedulerBench) -> None:
    """Unload everything, and check that neither host memory nor a slot holds an adapter."""
    bench.put(*(UnloadAdapter(each) for each in range(1, NUM_ADAPTERS + 1)))
    bench.finish()
    assert not bench.engine.registered
    assert bench.stats[-1].resident_adapters == bench.stats[-1].waiting_adapters == []


@examples(100)
@HISTORIES
def test_every_client_gets_the_tokens_of_its_adapter_and_one_end(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    check_history(options, adapters, crowd, turns)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(FULL)
@HISTORIES
def test_every_client_gets_the_tokens_of_its_adapter_and_one_end_at_length(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    check_history(options, adapters, crowd, turns)


def check_lockstep(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    ours, theirs = (SchedulerBench(enable_lora=True, **options) for _ in range(2))
    ours.store.turns = theirs.store.turns = turns
    assert run(ours, adapters, crowd)[1] == run(theirs, adapters, crowd)[1]
    assert ours.replies == theirs.replies and ours.store.reads == theirs.store.reads


@examples(20)
@HISTORIES
def test_two_schedulers_plan_in_lockstep(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    check_lockstep(options, adapters, crowd, turns)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(100)
@HISTORIES
def test_two_schedulers_plan_in_lockstep_at_length(
    options: dict[str, Any], adapters: list[AdapterLife], crowd: list[Client], turns: int
) -> None:
    check_lockstep(options, adapters, crowd, turns)
