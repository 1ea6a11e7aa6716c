"""Scheduler and engine together: a request gets the same result alone and in a crowd under memory pressure."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import make_config, make_engine
from grammar_factory import GrammarFactory
from scheduler_bench import MemoryChannel, Replies, Reply
from tiny_models import make_model
from tiny_tokenizer import EOS_ID, VOCAB_SIZE

from skiff_runtime.messages import (
    AbortRequest,
    CompiledGrammar,
    FinishReason,
    GenerateRequest,
    SamplingSpec,
    TextOptions,
    Wire,
)
from skiff_runtime.scheduler.scheduler import Scheduler

REQUESTS = 16
ABORTED = (3, 7, 11)
PATTERNS = ("[a-f]{12,40}", "(yes|no|perhaps){9,20}", '\\{"n": [0-9]{1,9}\\}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=37)


@pytest.fixture(scope="module")
def maker(model: Path) -> GrammarFactory:
    return GrammarFactory(model)


@pytest.fixture(scope="module")
def alone(model: Path, maker: GrammarFactory) -> "Outcome":
    """The outcome of each request alone."""
    return serve(
        model,
        make_requests(maker),
        max_running_requests=1,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    )


def make_requests(maker: GrammarFactory) -> list[GenerateRequest]:
    """Return random requests with all sampling parameters; some share the beginning of their prompts."""
    rng = np.random.default_rng(3)
    shared = rng.integers(5, VOCAB_SIZE, 40)
    grammars: list[CompiledGrammar | None] = [None, None, *map(maker.regex, PATTERNS)]
    requests = []
    for uid in range(REQUESTS):
        prompt = np.concatenate(
            [shared[: rng.integers(0, 40)], rng.integers(5, VOCAB_SIZE, rng.integers(1, 30))]
        )
        sampling = SamplingSpec(
            max_tokens=int(rng.integers(1, 60)),
            seed=uid,
            temperature=float(rng.choice([0.0, 0.8, 1.5])),
            top_k=int(rng.choice([0, 0, 8])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_tokens=int(rng.choice([0, 0, 7])),
            presence_penalty=float(rng.choice([0.0, 0.0, 1.2])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.4])),
            logit_bias=((int(rng.integers(5, VOCAB_SIZE)), 4.0),) if rng.random() < 0.3 else (),
            logprobs=int(rng.integers(0, 4)) if rng.random() < 0.5 else None,
            prompt_logprobs=int(rng.integers(0, 4)) if rng.random() < 0.3 else None,
        )
        grammar = grammars[rng.integers(len(grammars))]
        tokens = prompt.astype(Wire.TOKEN).tobytes()
        requests.append(GenerateRequest(uid, tokens, sampling, TextOptions(), grammar=grammar))
    return requests


@dataclass(frozen=True)
class Outcome:
    """Replies by request, and the number of preemptions."""

    replies: dict[int, Reply]
    preempted: int


def serve(
    path: Path, requests: list[GenerateRequest], *, aborted: Collection[int] = (), **changes: Any
) -> Outcome:
    """Send three requests per turn, until all have ended; abort the ``aborted`` in the turn after their first token."""
    config = make_config(path, page_size=4, log_level="debug", **changes)
    engine = make_engine(path, page_size=4, log_level="debug", **changes)
    channel, replies, preempted = MemoryChannel(), Replies(), 0
    scheduler = Scheduler(
        config, eos_token_ids=(EOS_ID,), num_pages=engine.num_pages, engine=engine, channel=channel
    )
    waiting, left = list(requests), list(aborted)
    while waiting or not scheduler.is_idle or channel.arriving:
        channel.arriving.extend(waiting[:3])
        del waiting[:3]
        scheduler.turn()
        while channel.sent:
            batch = channel.sent.popleft()
            replies.take(batch)
            for uid in [uid for uid in left if uid in replies and replies[uid].tokens]:
                left.remove(uid)
                channel.arriving.append(AbortRequest(uid))
            preempted += batch.stats.preempted
    engine.close()
    return Outcome(dict(replies), preempted)


@pytest.mark.parametrize("overlap", [True, False])
def test_result_is_the_same_alone_and_in_a_crowd(
    model: Path, maker: GrammarFactory, alone: "Outcome", overlap: bool
) -> None:
    """The crowd has few pages, so that requests are preempted, chunked prompts, and mixed batches of all kinds."""
    requests = make_requests(maker)
    crowded = serve(
        model,
        requests,
        aborted=ABORTED,
        max_total_tokens=136,
        max_num_batched_tokens=24,
        disable_overlap_schedule=not overlap,
    )
    assert alone.preempted == 0 and crowded.preempted > 0
    for request in requests:
        single, beside = alone.replies[request.uid], crowded.replies[request.uid]
        if request.uid in ABORTED:
            assert beside.has_ended and beside.tokens == single.tokens[: len(beside.tokens)]
            continue
        assert (beside.tokens, beside.finish) == (single.tokens, single.finish), request
        assert_close(beside.logprobs, single.logprobs)
        assert_close(beside.prompt_logprobs, single.prompt_logprobs)
        assert len(single.prompt_logprobs) == (
            0 if request.sampling.prompt_logprobs is None else len(request.token_ids) // 4
        )
        if request.grammar is not None and single.finish == FinishReason.STOP:
            assert_matches(maker, request.grammar, single.tokens)


def assert_close(some: list[tuple[int, float, list[int], list[float]]], others: list[Any]) -> None:
    assert [(token, ids) for token, _, ids, _ in some] == [(token, ids) for token, _, ids, _ in others]
    for (_, value, _, top), (_, other, _, other_top) in zip(some, others, strict=True):
        np.testing.assert_allclose([value, *top], [other, *other_top], atol=1e-3)


def assert_matches(maker: GrammarFactory, grammar: CompiledGrammar, tokens: list[int]) -> None:
    assert tokens[-1] == EOS_ID
    assert re.fullmatch(grammar.key, maker.written(tokens[:-1]))
