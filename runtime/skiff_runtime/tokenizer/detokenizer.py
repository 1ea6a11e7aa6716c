"""The detokenizer process: receives token batches of rank 0 and sends text batches to the API.

With ``--tokenizer-worker-num 0`` it tokenizes, too. Token batches then come first, because streams wait for them.
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
from skiff_runtime.tokenizer.grammar_queue import GrammarQueue
from skiff_runtime.tokenizer.incremental_detokenizer import IncrementalDetokenizer
from skiff_runtime.tokenizer.logprobs_processor import LogprobsProcessor
from skiff_runtime.tokenizer.tokenizer_worker import (
    WAIT_SECONDS,
    TokenizerMessage,
    TokenizerWorker,
    load_prompt_builder,
)
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.decode_stream import TokenDecoder, WindowDecoder
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

MAX_BATCHES_PER_TURN: Final = 64


class Detokenizer:
    """Detokenizes all running requests. The state of a request lives from its opening to its terminal row."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._logprobs = LogprobsProcessor(decoder)
        self._requests: dict[int, IncrementalDetokenizer] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def detokenize(self, batch: TokenBatch) -> tuple[TextBatch, list[int]]:
        """Return the batch as text, and the uids of requests that a stop string ended while they still generate."""
        for opened in batch.opened:
            self._open(opened)
        prompt_logprobs = [
            self._logprobs.convert_prompt(each)
            for each in batch.prompt_logprobs
            if each.uid in self._requests
        ]
        rows = _TextRows(batch)
        for row, (uid, token) in enumerate(zip(rows.uids.tolist(), rows.tokens.tolist(), strict=True)):
            finish = rows.finishes[row]
            request = self._requests.pop(uid, None) if finish else self._requests.get(uid)
            if request is None:
                rows.add_unopened(row)
            elif request.stopped:
                # The scheduler planned this row before it learned of the stop string.
                rows.drop(row)
            else:
                rows.add(row, token, finish, request)
        for failed in batch.failed:
            self._requests.pop(failed.uid, None)
        logprobs = (
            self._logprobs.convert_rows(batch.logprobs, rows.tokens, rows.dropped) if batch.logprobs else []
        )
        return rows.to_text_batch(batch, logprobs, prompt_logprobs), rows.stopped_uids

    def _open(self, opened: StreamOpened) -> None:
        # A preempted request is opened again when it resumes; its text so far stays.
        if opened.uid not in self._requests:
            stream = self._decoder.stream(skip_special_tokens=opened.text.skip_special_tokens)
            self._requests[opened.uid] = IncrementalDetokenizer(opened, stream)


class _TextRows:
    """The rows of one token batch while they become those of a text batch.

    ``dropped`` are the indices (ascending) of rows that the text batch omits.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self.uids: NDArray[np.int64] = np.frombuffer(batch.uids, dtype=Wire.UID)
        self.tokens: NDArray[np.int32] = np.frombuffer(batch.tokens, dtype=Wire.TOKEN)
        self.finishes = bytearray(batch.finishes)
        self.dropped: list[int] = []
        self.stopped_uids: list[int] = []
        self._texts: list[str] = []
        self._usages: list[Usage] = []

    def add(self, row: int, token: int, finish: int, request: IncrementalDetokenizer) -> None:
        """Detokenize one row. A stop string turns its finish reason into ``STOP``."""
        self._texts.append(request.finish(token, FinishReason(finish)) if finish else request.push(token))
        if request.stopped:
            self.finishes[row] = FinishReason.STOP
            if not finish:
                self.stopped_uids.append(int(self.uids[row]))
        if finish or request.stopped:
            self._usages.append(request.usage())

    def add_unopened(self, row: int) -> None:
        """Add the terminal row of a request that never ran; drop any other row without a request."""
        if self.finishes[row]:
            self._texts.append("")
            self._usages.append(Usage(0, 0, 0))
        else:
            self.drop(row)

    def drop(self, row: int) -> None:
        """Omit a row from the text batch."""
        self.dropped.append(row)

    def to_text_batch(
        self, batch: TokenBatch, logprobs: list[TextLogprobs], prompt_logprobs: list[PromptTextLogprobs]
    ) -> TextBatch:
        """Build the message to the API."""
        return TextBatch(
            uids=self._encode_kept(self.uids),
            texts=self._texts,
            tokens=self._encode_kept(self.tokens),
            finishes=self._encode_kept(np.frombuffer(self.finishes, dtype=Wire.FINISH)),
            usages=self._usages,
            failed=batch.failed,
            stats=batch.stats,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            flushed=batch.flushed,
            opened=batch.opened,
            pooled=batch.pooled,
            cache_events=batch.cache_events,
            adapters=batch.adapters,
        )

    def _encode_kept(self, column: NDArray[Any]) -> bytes:
        return (np.delete(column, self.dropped) if self.dropped else column).tobytes()


class DetokenizerWorker:
    """Serves the detokenizer endpoint."""

    def __init__(self, detokenizer: Detokenizer, *, scheduler: Sender, api: Sender) -> None:
        self._detokenizer = detokenizer
        self._scheduler = scheduler
        self._api = api

    def serve(self, batch: TokenBatch) -> None:
        """Detokenize one batch and send it to the API. Abort the requests that a stop string ended."""
        texts, stopped = self._detokenizer.detokenize(batch)
        # First the aborts: each step that the scheduler plans before them computes a token in vain.
        for uid in stopped:
            self._scheduler.send(AbortRequest(uid=uid, finish=FinishReason.STOP))
        self._api.send(texts)


def load_decoder(launch: Launch) -> TokenDecoder:
    """Load the decoder of the model's vocabulary. Raises ``ModelError``."""
    path = read_tokenizer_files(launch.model.path, launch.model.tokenizer_path).tokenizer
    decoder = read_byte_level_decoder(path)
    if decoder is None:
        return WindowDecoder(load_tokenizer(path))
    if launch.config.load_format == "dummy":
        # Random weights sample any id. Ids without a text get one, so that as much is streamed as by a real model.
        decoder.pad_to(launch.model.vocab_size)
    return decoder


def run(child: Child) -> None:
    """Run the detokenizer process."""
    child.report_phase("config")
    endpoints = child.endpoints
    batches: Receiver[TokenBatch] = Receiver(endpoints.detokenizer, ToDetokenizer)
    scheduler, api = Sender(endpoints.rank(0)), Sender(endpoints.api)
    worker = DetokenizerWorker(Detokenizer(load_decoder(child.launch)), scheduler=scheduler, api=api)
    if child.launch.config.tokenizer_worker_num:
        _run_alone(child, batches, worker)
        return
    _run_with_tokenizer(child, batches, worker, scheduler=scheduler, api=api)


def _run_alone(child: Child, batches: Receiver[TokenBatch], worker: DetokenizerWorker) -> None:
    child.report_phase("ready")
    child.report_ready()
    while not child.should_stop:
        batch = batches.receive(WAIT_SECONDS)
        if batch is not None:
            worker.serve(batch)
        child.beat()


def _run_with_tokenizer(
    child: Child, batches: Receiver[TokenBatch], worker: DetokenizerWorker, *, scheduler: Sender, api: Sender
) -> None:
    prompts: Receiver[TokenizerMessage] = Receiver(child.endpoints.tokenizer(0), ToTokenizer)
    poller = zmq.Poller()
    poller.register(batches.socket, zmq.POLLIN)
    poller.register(prompts.socket, zmq.POLLIN)
    grammars = GrammarQueue(GrammarCompileQueue(child.launch, poller))
    tokenizer = TokenizerWorker(load_prompt_builder(child.launch), grammars, scheduler=scheduler, api=api)
    child.report_phase("ready")
    child.report_ready()
    while not child.should_stop:
        poller.poll(int(grammars.seconds_left(WAIT_SECONDS) * 1000) + 1)
        for batch in batches.drain(MAX_BATCHES_PER_TURN):
            worker.serve(batch)
        # One prompt at a time, because streams of running requests wait meanwhile.
        for message in prompts.drain(1):
            tokenizer.serve(message)
        tokenizer.forward_decided()
        child.beat()
    grammars.close()
