"""The tokenizer process's messages: copies of a request, token ids and texts on demand, one reply to each."""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from tiny_config import write_config
from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

from skiff_runtime.config import Config
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages import (
    AbortRequest,
    ChatPrompt,
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    FinishReason,
    FlushCache,
    GenerateRequest,
    Grammar,
    GrammarKind,
    RequestFailed,
    SamplingSpec,
    TextOptions,
    ToApi,
    TokenizeRequest,
    ToScheduler,
    Wire,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import read_model_config
from skiff_runtime.processes.launch import Launch
from skiff_runtime.tokenizer.grammar_queue import Grammars
from skiff_runtime.tokenizer.tokenizer_worker import TokenizerWorker, load_prompt_builder

CONTEXT = 64


@dataclass
class Bench:
    """A worker, and the sockets it writes to."""

    worker: TokenizerWorker
    grammars: Grammars
    poller: zmq.Poller
    scheduler_inbox: "Receiver[Any]"
    api_inbox: "Receiver[Any]"

    def scheduler(self, timeout_seconds: float = 5.0) -> Any:
        """The next message to the scheduler, or None."""
        return self.scheduler_inbox.receive(timeout_seconds)

    def api(self, timeout_seconds: float = 5.0) -> Any:
        """The next message to the API, or None."""
        return self.api_inbox.receive(timeout_seconds)

    def turn(self) -> None:
        """What the process's loop does until no request waits for a grammar."""
        deadline = time.monotonic() + 60
        while len(self.grammars):
            assert time.monotonic() < deadline, "a request still waits for its grammar"
            self.poller.poll(int(self.grammars.seconds_left(0.5) * 1000) + 1)
            self.worker.turn()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="skiff-test-") as directory:
        yield from running_bench(Path(directory))


def running_bench(directory: Path) -> Iterator[Bench]:
    write_config(directory)
    write_tokenizer(directory)
    config = Config(model=str(directory), max_model_len=CONTEXT, grammar_timeout_seconds=1.5)
    launch = Launch(config=config, model=read_model_config(directory), run_dir=directory)
    launch.write()
    endpoints, poller = Endpoints(directory), zmq.Poller()
    inboxes = Receiver[Any](endpoints.rank(0), ToScheduler), Receiver[Any](endpoints.api, ToApi)
    senders = Sender(endpoints.rank(0)), Sender(endpoints.api)
    grammars = Grammars(GrammarCompileQueue(launch, poller))
    worker = TokenizerWorker(load_prompt_builder(launch), grammars, scheduler=senders[0], api=senders[1])
    yield Bench(worker, grammars, poller, *inboxes)
    grammars.close()
    for closable in (*senders, *inboxes):
        closable.close()


def request(
    prompt: str | list[int] | ChatPrompt,
    *,
    uid: int = 7,
    copies: int = 1,
    seed: int = 5,
    grammar: Grammar | None = None,
) -> TokenizeRequest:
    sampling = SamplingSpec(max_tokens=4, seed=seed)
    return TokenizeRequest(uid, prompt, sampling, TextOptions(), copies=copies, priority=3, grammar=grammar)


def slow(length: int) -> Grammar:
    """A grammar that takes many seconds, for strings of a length that no other test has."""
    leaf = {"type": "string", "maxLength": length}
    branch = {"type": "object", "properties": {f"leaf{place}": leaf for place in range(20)}}
    tree = {"type": "object", "properties": {f"branch{place}": branch for place in range(20)}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tree))


def kill_compiler(bench: Bench, but: int = 0) -> int:
    """Kill the process that compiles for the bench, another one than ``but``; its id."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.pid != but and "skiff_runtime.grammar.compiler.compiler_process" in child.cmdline():
                    child.kill()
                    return child.pid
        bench.poller.poll(10)
        bench.worker.turn()
    raise AssertionError("no process compiles")


def test_copies_have_uids_and_seeds_that_count_upwards(bench: Bench) -> None:
    bench.worker.serve(request([5, 6], copies=3, seed=(1 << 63) - 2))
    told = [bench.scheduler() for _ in range(3)]
    assert [each.uid for each in told] == [7, 8, 9]
    assert [each.sampling.seed for each in told] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
    assert {(each.token_ids, each.priority) for each in told} == {(np.array([5, 6], Wire.TOKEN).tobytes(), 3)}


def test_each_copy_of_a_refused_request_is_told(bench: Bench) -> None:
    bench.worker.serve(request([], copies=2))
    assert [bench.api().uid for _ in range(2)] == [7, 8]
    assert bench.scheduler(0.05) is None


def test_encode_tells_ids_and_pieces(bench: Bench) -> None:
    bench.worker.serve(EncodeRequest(1, "The boat 🙂"))
    told = bench.api()
    assert isinstance(told, Encoded)
    ids = np.frombuffer(told.token_ids, Wire.TOKEN).tolist()
    assert ids[0] == BOS_ID
    assert told.texts[:1] == ["<|begin|>"]
    assert len(told.texts) == len(ids)
    bench.worker.serve(EncodeRequest(2, "The boat 🙂", add_special_tokens=False))
    assert np.frombuffer(bench.api().token_ids, Wire.TOKEN).tolist() == ids[1:]
    bench.worker.serve(DecodeRequest(3, ids))
    assert bench.api() == Decoded(3, "<|begin|>The boat 🙂")


def test_encode_renders_a_chat(bench: Bench) -> None:
    bench.worker.serve(EncodeRequest(1, ChatPrompt([{"role": "user", "content": "boat"}])))
    ids = np.frombuffer(bench.api().token_ids, Wire.TOKEN).tolist()
    assert (ids[0], ids.count(BOS_ID), ids.count(EOS_ID)) == (BOS_ID, 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        EncodeRequest(4, "half \ud83d"),
        EncodeRequest(4, "a" * 10**6),
        DecodeRequest(4, [VOCAB_SIZE]),
        DecodeRequest(4, [-1]),
        DecodeRequest(4, [5] * (CONTEXT + 1)),
    ],
)
def test_what_cannot_be_told_is_refused(bench: Bench, message: EncodeRequest | DecodeRequest) -> None:
    bench.worker.serve(message)
    told = bench.api()
    assert isinstance(told, RequestFailed)
    assert (told.uid, told.status) == (4, 400)


def test_aborts_and_flushes_are_passed_on_in_order(bench: Bench) -> None:
    for message in (request([5]), AbortRequest(7), FlushCache(8)):
        bench.worker.serve(message)
    kinds = [type(bench.scheduler()).__name__ for _ in range(3)]
    assert kinds == ["GenerateRequest", "AbortRequest", "FlushCache"]


def test_a_request_waits_for_its_grammar_and_others_go_on(bench: Bench) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    bench.worker.serve(request([5], uid=10, copies=2, grammar=grammar))
    bench.worker.serve(request([6], uid=20))
    assert bench.scheduler().uid == 20
    bench.turn()
    told = [bench.scheduler() for _ in range(2)]
    assert [each.uid for each in told] == [10, 11]
    assert told[0].grammar == told[1].grammar
    assert b'"' in told[0].grammar.data
    bench.worker.serve(request([5], uid=30, grammar=grammar))
    assert bench.scheduler().grammar == told[0].grammar, "the second time it is there at once"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.REGEX, "("), "cannot be compiled.*parenthesis"),
        (Grammar(GrammarKind.EBNF, "root ::= other"), "cannot be compiled.*other"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}'), "'uniqueItems' .* at # is not supported"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"anyOf": ['), "no valid JSON"),
        (Grammar(GrammarKind.REGEX, "(a|b)^c"), "cannot be enforced.*should be at the start"),
        (slow(400), "not compiled within 1.5 s"),
        (Grammar(GrammarKind.REGEX, "a"), ""),
    ],
)
def test_a_grammar_that_cannot_be_served_is_a_400(bench: Bench, grammar: Grammar, says: str) -> None:
    """Also one that takes too long, after which the next one (the last case) is served by a new process."""
    bench.worker.serve(request([5], grammar=grammar))
    bench.turn()
    if not says:
        assert isinstance(bench.scheduler(), GenerateRequest)
        return
    failed = bench.api()
    assert (failed.uid, failed.status, failed.code) == (7, 400, "invalid_grammar")
    assert re.search(says, failed.message)


def test_a_request_that_waits_can_be_aborted(bench: Bench) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{3}")
    bench.worker.serve(request([5], copies=3, grammar=grammar))
    bench.worker.serve(AbortRequest(8))
    bench.worker.serve(AbortRequest(9, FinishReason.TIMEOUT))
    assert [(told.uid, told.status) for told in (bench.api(), bench.api())] == [(8, 499), (9, 408)]
    bench.turn()
    assert bench.scheduler().uid == 7
    assert bench.scheduler(0.05) is None
    bench.worker.serve(AbortRequest(7))
    assert isinstance(bench.scheduler(), AbortRequest)


def test_a_compiler_that_dies_is_replaced_and_its_task_tried_once_more(bench: Bench) -> None:
    bench.worker.serve(request([5], uid=40, grammar=Grammar(GrammarKind.REGEX, "warm")))
    bench.turn()
    assert bench.scheduler().uid == 40
    bench.worker.serve(request([5], uid=41, grammar=slow(401)))
    bench.worker.serve(request([5], uid=42, grammar=Grammar(GrammarKind.REGEX, "abc")))
    kill_compiler(bench, but=kill_compiler(bench))
    bench.turn()
    failed = bench.api()
    assert (failed.uid, failed.status) == (41, 500)
    assert bench.scheduler().uid == 42
