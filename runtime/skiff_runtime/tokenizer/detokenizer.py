"""The detokenizer process: token batches of rank 0 in, text batches for the API out.

With ``--tokenizer-worker-num 0`` it tokenizes too; token batches then come first, for streams wait for them.
"""

from typing import Any, Final

import numpy as np
import zmq
from numpy.typing import NDArray

from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages import (
    AbortRequest,
    FinishReason,
    PromptTextLogprobs,
    StreamOpened,
    TextBatch,
    TextLogprobs,
    ToDetokenizer,
    TokenBatch,
    ToTokenizer,
    Usage,
    Wire,
)
from skiff_runtime.messages.transport import Receiver, Sender
from skiff_runtime.processes.child_process import Child
from skiff_runtime.processes.launch import Launch
from skiff_runtime.tokenizer.grammar_queue import Grammars
from skiff_runtime.tokenizer.incremental_detokenizer import Reply
from skiff_runtime.tokenizer.logprobs_processor import LogprobsProcessor
from skiff_runtime.tokenizer.tokenizer_worker import (
    WAIT_SECONDS,
    TokenizerMessage,
    TokenizerWorker,
    load_prompt_builder,
)
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.decode_stream import Decoder, WindowDecoder
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

MAX_BATCHES_PER_TURN: Final = 64


class Detokenizer:
    """The text of every running request. A request's state lives from its opening to its terminal row."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._logprobs = LogprobsProcessor(decoder)
        self._replies: dict[int, Reply] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def detokenize(self, batch: TokenBatch) -> tuple[TextBatch, list[int]]:
        """The batch's text, and the uids that a stop string ended, whose generation must be ended too."""
        for opened in batch.opened:
            self._open(opened)
        prompts = [self._logprobs.prompt(each) for each in batch.prompt_logprobs if each.uid in self._replies]
        rows = _Rows(batch)
        for row, (uid, token) in enumerate(zip(rows.uids.tolist(), rows.tokens.tolist(), strict=True)):
            finish = rows.finishes[row]
            reply = self._replies.pop(uid, None) if finish else self._replies.get(uid)
            if reply is None:
                rows.unopened(row)
            elif reply.stopped:
                rows.dropped.append(row)
            else:
                rows.texts.append(reply.end(token, FinishReason(finish)) if finish else reply.push(token))
                if reply.stopped:
                    rows.finishes[row] = FinishReason.STOP
                    if not finish:
                        rows.stopped.append(uid)
                if rows.finishes[row]:
                    rows.usages.append(reply.usage())
        for failed in batch.failed:
            self._replies.pop(failed.uid, None)
        logprobs = self._logprobs.rows(batch.logprobs, rows.tokens, rows.dropped) if batch.logprobs else []
        return rows.text_batch(batch, logprobs, prompts), rows.stopped

    def _open(self, opened: StreamOpened) -> None:
        if opened.uid not in self._replies:
            stream = self._decoder.stream(skip_special_tokens=opened.text.skip_special_tokens)
            self._replies[opened.uid] = Reply(opened, stream)


class _Rows:
    """The rows of one batch while they are turned into text."""

    def __init__(self, batch: TokenBatch) -> None:
        self.uids: NDArray[np.int64] = np.frombuffer(batch.uids, dtype=Wire.UID)
        self.tokens: NDArray[np.int32] = np.frombuffer(batch.tokens, dtype=Wire.TOKEN)
        self.finishes = bytearray(batch.finishes)
        self.texts: list[str] = []
        self.usages: list[Usage] = []
        self.dropped: list[int] = []
        self.stopped: list[int] = []

    def unopened(self, row: int) -> None:
        """A row without state: the end of a request that never ran is told, anything else is nobody's."""
        if self.finishes[row]:
            self.texts.append("")
            self.usages.append(Usage(0, 0, 0))
        else:
            self.dropped.append(row)

    def text_batch(
        self, batch: TokenBatch, logprobs: list[TextLogprobs], prompts: list[PromptTextLogprobs]
    ) -> TextBatch:
        """What the API is told of ``batch``."""
        return TextBatch(
            uids=self._kept(self.uids),
            texts=self.texts,
            tokens=self._kept(self.tokens),
            finishes=self._kept(np.frombuffer(self.finishes, dtype=Wire.FINISH)),
            usages=self.usages,
            failed=batch.failed,
            stats=batch.stats,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            flushed=batch.flushed,
            opened=batch.opened,
        )

    def _kept(self, column: NDArray[Any]) -> bytes:
        return (np.delete(column, self.dropped) if self.dropped else column).tobytes()


class DetokenizerWorker:
    """Serves the detokenizer endpoint."""

    def __init__(self, detokenizer: Detokenizer, *, scheduler: Sender, api: Sender) -> None:
        self._detokenizer = detokenizer
        self._scheduler = scheduler
        self._api = api

    def serve(self, batch: TokenBatch) -> None:
        """Send one batch on; the scheduler is told first of the requests that need no more tokens."""
        texts, stopped = self._detokenizer.detokenize(batch)
        for uid in stopped:
            self._scheduler.send(AbortRequest(uid=uid, finish=FinishReason.STOP))
        self._api.send(texts)


def load_decoder(launch: Launch) -> Decoder:
    """Read the model's vocabulary. Raises ``ModelError``.

    Random weights choose any id: one that has no text gets some, so that what streams is what a real model streams.
    """
    path = read_tokenizer_files(launch.model.path, launch.model.tokenizer_path).tokenizer
    decoder = read_byte_level_decoder(path)
    if decoder is None:
        return WindowDecoder(load_tokenizer(path))
    if launch.config.load_format == "dummy":
        decoder.fill(launch.model.vocab_size)
    return decoder


def run(child: Child) -> None:
    """Main function of the detokenizer process."""
    child.phase("config")
    endpoints = child.endpoints
    batches: Receiver[TokenBatch] = Receiver(endpoints.detokenizer, ToDetokenizer)
    scheduler, api = Sender(endpoints.rank(0)), Sender(endpoints.api)
    worker = DetokenizerWorker(Detokenizer(load_decoder(child.launch)), scheduler=scheduler, api=api)
    if child.launch.config.tokenizer_worker_num:
        _run_alone(child, batches, worker)
        return
    _run_both(child, batches, worker, scheduler=scheduler, api=api)


def _run_alone(child: Child, batches: Receiver[TokenBatch], worker: DetokenizerWorker) -> None:
    child.phase("ready")
    child.ready()
    while not child.stopping:
        batch = batches.receive(WAIT_SECONDS)
        if batch is not None:
            worker.serve(batch)
        child.beat()


def _run_both(
    child: Child, batches: Receiver[TokenBatch], worker: DetokenizerWorker, *, scheduler: Sender, api: Sender
) -> None:
    prompts: Receiver[TokenizerMessage] = Receiver(child.endpoints.tokenizer(0), ToTokenizer)
    poller = zmq.Poller()
    poller.register(batches.socket, zmq.POLLIN)
    poller.register(prompts.socket, zmq.POLLIN)
    grammars = Grammars(GrammarCompileQueue(child.launch, poller))
    tokenizer = TokenizerWorker(load_prompt_builder(child.launch), grammars, scheduler=scheduler, api=api)
    child.phase("ready")
    child.ready()
    while not child.stopping:
        poller.poll(int(grammars.seconds_left(WAIT_SECONDS) * 1000) + 1)
        for batch in batches.drain(MAX_BATCHES_PER_TURN):
            worker.serve(batch)
        for message in prompts.drain(1):
            tokenizer.serve(message)
        tokenizer.turn()
        child.beat()
    grammars.close()
