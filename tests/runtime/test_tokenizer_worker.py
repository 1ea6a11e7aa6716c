"""The tokenizer process's messages: copies of a request, token ids and texts on demand, one reply to each."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

from skiff_runtime.messages import (
    AbortRequest,
    ChatPrompt,
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    FlushCache,
    RequestFailed,
    SamplingParams,
    TextOptions,
    ToApi,
    TokenizeRequest,
    ToScheduler,
    Wire,
)
from skiff_runtime.tokenizer.encoder import Encoder, load_tokenizer
from skiff_runtime.tokenizer.model_files import read_tokenizer_files
from skiff_runtime.tokenizer.prompt import PromptBuilder
from skiff_runtime.tokenizer.template import ChatTemplate
from skiff_runtime.tokenizer.worker import TokenizerWorker
from skiff_runtime.transport import Endpoints, Receiver, Sender

CONTEXT = 64


@dataclass
class Bench:
    """A worker, and the sockets it writes to."""

    worker: TokenizerWorker
    scheduler_inbox: "Receiver[Any]"
    api_inbox: "Receiver[Any]"

    def scheduler(self, timeout_seconds: float = 5.0) -> Any:
        """The next message to the scheduler, or None."""
        return self.scheduler_inbox.receive(timeout_seconds)

    def api(self, timeout_seconds: float = 5.0) -> Any:
        """The next message to the API, or None."""
        return self.api_inbox.receive(timeout_seconds)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    write_tokenizer(tmp_path)
    files = read_tokenizer_files(tmp_path)
    encoder = Encoder(load_tokenizer(files.tokenizer), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    builder = PromptBuilder(ChatTemplate(files.template, files.special_tokens), encoder, CONTEXT)
    with tempfile.TemporaryDirectory(prefix="skiff-test-") as directory:
        endpoints = Endpoints(Path(directory))
        scheduler, api = Receiver[Any](endpoints.rank(0), ToScheduler), Receiver[Any](endpoints.api, ToApi)
        senders = Sender(endpoints.rank(0)), Sender(endpoints.api)
        yield Bench(TokenizerWorker(builder, scheduler=senders[0], api=senders[1]), scheduler, api)
        for closable in (*senders, scheduler, api):
            closable.close()


def request(prompt: str | list[int] | ChatPrompt, *, copies: int = 1, seed: int = 5) -> TokenizeRequest:
    sampling = SamplingParams(max_tokens=4, seed=seed)
    return TokenizeRequest(7, prompt, sampling, TextOptions(), copies=copies, priority=3)


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
