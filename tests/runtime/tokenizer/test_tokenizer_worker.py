"""Tokenizer worker: copies of requests, token ids and texts on demand, grammars, and one reply to each request."""

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
from skiff_runtime.tokenizer.grammar_queue import GrammarQueue
from skiff_runtime.tokenizer.tokenizer_worker import TokenizerWorker, load_prompt_builder

CONTEXT = 64


@dataclass
class Bench:
    """A tokenizer worker, and the receivers of its messages."""

    worker: TokenizerWorker
    grammars: GrammarQueue
    poller: zmq.Poller
    scheduler_inbox: "Receiver[Any]"
    api_inbox: "Receiver[Any]"

    def scheduler(self, timeout_seconds: float = 5.0) -> Any:
        """Return the next message to the scheduler, or None."""
        return self.scheduler_inbox.receive(timeout_seconds)

    def api(self, timeout_seconds: float = 5.0) -> Any:
        """Return the next message to the API, or None."""
        return self.api_inbox.receive(timeout_seconds)

    def run_until_compiled(self) -> None:
        """Run the main loop of the process until no request waits for a grammar."""
        deadline = time.monotonic() + 60
        while len(self.grammars):
            assert time.monotonic() < deadline, "a request is still waiting for its grammar"
            self.poller.poll(int(self.grammars.seconds_left(0.5) * 1000) + 1)
            self.worker.forward_decided()


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
    grammars = GrammarQueue(GrammarCompileQueue(launch, poller))
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


def slow_grammar(length: int) -> Grammar:
    """Return a grammar that takes many seconds to compile. A ``length`` that no other test uses avoids the cache."""
    leaf = {"type": "string", "maxLength": length}
    branch = {"type": "object", "properties": {f"leaf{index}": leaf for index in range(20)}}
    tree = {"type": "object", "properties": {f"branch{index}": branch for index in range(20)}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tree))


def kill_compiler(bench: Bench, other_than: int = 0) -> int:
    """Kill the compiler process, as soon as there is one with another pid than ``other_than``. Return its pid."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if (
                    child.pid != other_than
                    and "skiff_runtime.grammar.compiler.compiler_process" in child.cmdline()
                ):
                    child.kill()
                    return child.pid
        bench.poller.poll(10)
        bench.worker.forward_decided()
    raise AssertionError("there is no compiler process")


def test_copies_have_consecutive_uids_and_seeds(bench: Bench) -> None:
    bench.worker.serve(request([5, 6], copies=3, seed=(1 << 63) - 2))
    copies = [bench.scheduler() for _ in range(3)]
    assert [each.uid for each in copies] == [7, 8, 9]
    assert [each.sampling.seed for each in copies] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
    assert {(each.token_ids, each.priority) for each in copies} == {
        (np.array([5, 6], Wire.TOKEN).tobytes(), 3)
    }


def test_each_copy_of_a_refused_request_gets_a_reply(bench: Bench) -> None:
    bench.worker.serve(request([], copies=2))
    assert [bench.api().uid for _ in range(2)] == [7, 8]
    assert bench.scheduler(0.05) is None


def test_encode_returns_ids_and_the_text_of_each_token(bench: Bench) -> None:
    bench.worker.serve(EncodeRequest(1, "The boat 🙂", with_texts=True))
    encoded = bench.api()
    assert isinstance(encoded, Encoded)
    ids = np.frombuffer(encoded.token_ids, Wire.TOKEN).tolist()
    assert ids[0] == BOS_ID
    assert encoded.texts[:1] == ["<|begin|>"]
    assert len(encoded.texts) == len(ids)
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
def test_invalid_encode_and_decode_requests_are_refused(
    bench: Bench, message: EncodeRequest | DecodeRequest
) -> None:
    bench.worker.serve(message)
    failed = bench.api()
    assert isinstance(failed, RequestFailed)
    assert (failed.uid, failed.status) == (4, 400)


def test_aborts_and_flushes_are_forwarded_in_order(bench: Bench) -> None:
    for message in (request([5]), AbortRequest(7), FlushCache(8)):
        bench.worker.serve(message)
    kinds = [type(bench.scheduler()).__name__ for _ in range(3)]
    assert kinds == ["GenerateRequest", "AbortRequest", "FlushCache"]


def test_only_requests_with_a_grammar_wait_for_its_compilation(bench: Bench) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    bench.worker.serve(request([5], uid=10, copies=2, grammar=grammar))
    bench.worker.serve(request([6], uid=20))
    assert bench.scheduler().uid == 20
    bench.run_until_compiled()
    copies = [bench.scheduler() for _ in range(2)]
    assert [each.uid for each in copies] == [10, 11]
    assert copies[0].grammar == copies[1].grammar
    assert b'"' in copies[0].grammar.data
    bench.worker.serve(request([5], uid=30, grammar=grammar))
    assert bench.scheduler().grammar == copies[0].grammar, "the grammar is cached"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.REGEX, "("), "cannot be compiled.*parenthesis"),
        (Grammar(GrammarKind.EBNF, "root ::= other"), "cannot be compiled.*other"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}'), "'uniqueItems' .* at # is not supported"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"anyOf": ['), "not valid JSON"),
        (Grammar(GrammarKind.REGEX, "(a|b)^c"), "cannot be enforced.*should be at the start"),
        (slow_grammar(400), "not compiled within 1.5 s"),
        (Grammar(GrammarKind.REGEX, "a"), ""),
    ],
)
def test_invalid_and_slow_grammars_are_refused(bench: Bench, grammar: Grammar, says: str) -> None:
    """After the compiler process was killed for being too slow, a new one compiles the last case."""
    bench.worker.serve(request([5], grammar=grammar))
    bench.run_until_compiled()
    if not says:
        assert isinstance(bench.scheduler(), GenerateRequest)
        return
    failed = bench.api()
    assert (failed.uid, failed.status, failed.code) == (7, 400, "invalid_grammar")
    assert re.search(says, failed.message)


def test_request_is_aborted_while_its_grammar_is_being_compiled(bench: Bench) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{3}")
    bench.worker.serve(request([5], copies=3, grammar=grammar))
    bench.worker.serve(AbortRequest(8))
    bench.worker.serve(AbortRequest(9, FinishReason.TIMEOUT))
    assert [(failed.uid, failed.status) for failed in (bench.api(), bench.api())] == [(8, 499), (9, 408)]
    bench.run_until_compiled()
    assert bench.scheduler().uid == 7
    assert bench.scheduler(0.05) is None
    bench.worker.serve(AbortRequest(7))
    assert isinstance(bench.scheduler(), AbortRequest)


def test_compiler_that_dies_is_replaced_and_its_grammar_retried_once(bench: Bench) -> None:
    bench.worker.serve(request([5], uid=40, grammar=Grammar(GrammarKind.REGEX, "warm")))
    bench.run_until_compiled()
    assert bench.scheduler().uid == 40
    bench.worker.serve(request([5], uid=41, grammar=slow_grammar(401)))
    bench.worker.serve(request([5], uid=42, grammar=Grammar(GrammarKind.REGEX, "abc")))
    kill_compiler(bench, other_than=kill_compiler(bench))
    bench.run_until_compiled()
    failed = bench.api()
    assert (failed.uid, failed.status) == (41, 500)
    assert bench.scheduler().uid == 42
