"""The tokenizer process: receives requests of the API and sends requests to the scheduler, in order."""

import os
from collections.abc import Iterator
from typing import Final

import zmq
from msgspec.structs import replace

from skiff_runtime import log
from skiff_runtime.errors import RequestError
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages import (
    AbortRequest,
    DecodeRequest,
    EncodeRequest,
    FlushCache,
    GenerateRequest,
    LoadAdapter,
    RequestFailed,
    TokenizeRequest,
    ToTokenizer,
    UnloadAdapter,
    WatchCache,
)
from skiff_runtime.messages.transport import Receiver, Sender
from skiff_runtime.processes.child_process import Child
from skiff_runtime.processes.launch import Launch
from skiff_runtime.tokenizer.grammar_queue import GrammarQueue
from skiff_runtime.tokenizer.prompt_builder import PromptBuilder
from skiff_runtime.vocabulary.chat_template import ChatTemplate
from skiff_runtime.vocabulary.encoder import Encoder, load_tokenizer
from skiff_runtime.vocabulary.fastokens_encoder import choose_encoder
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

WAIT_SECONDS: Final = 0.5
NICENESS: Final = 5
"""On few cores, running streams come before waiting prompts: encoding a huge prompt may take seconds."""
_INT64_HALF: Final = 1 << 63

ForwardedMessage = AbortRequest | FlushCache | WatchCache | LoadAdapter | UnloadAdapter
TokenizerMessage = TokenizeRequest | EncodeRequest | DecodeRequest | ForwardedMessage


class TokenizerWorker:
    """Serves one tokenizer endpoint."""

    def __init__(
        self, builder: PromptBuilder, grammars: GrammarQueue, *, scheduler: Sender, api: Sender
    ) -> None:
        self._builder = builder
        self._grammars = grammars
        self._scheduler = scheduler
        self._api = api

    def forward_decided(self) -> None:
        """Send requests whose grammar was compiled to the scheduler, and the refusals of others to the API."""
        for decided in self._grammars.pop_decided():
            receiver = self._scheduler if isinstance(decided, GenerateRequest) else self._api
            receiver.send(decided)

    def serve(self, message: TokenizerMessage) -> None:
        """Serve one message. A request that cannot be served is answered with ``RequestFailed``."""
        if isinstance(message, AbortRequest) and (ended := self._grammars.abort(message)) is not None:
            self._api.send(ended)
            return
        if isinstance(message, ForwardedMessage):
            self._scheduler.send(message)
            return
        try:
            self._answer(message)
        except RequestError as error:
            for uid in _uids_of(message):
                self._api.send(RequestFailed.of(uid, error))

    def _answer(self, message: TokenizeRequest | EncodeRequest | DecodeRequest) -> None:
        if isinstance(message, EncodeRequest):
            self._api.send(self._builder.encode(message))
        elif isinstance(message, DecodeRequest):
            self._api.send(self._builder.decode(message))
        else:
            self._generate(message)

    def _generate(self, message: TokenizeRequest) -> None:
        requests = expand_copies(self._builder.build(message), message.copies)
        if message.grammar is not None:
            requests = iter(self._grammars.attach(requests, message.grammar))
        for request in requests:
            self._scheduler.send(request)


def expand_copies(request: GenerateRequest, count: int) -> Iterator[GenerateRequest]:
    """Yield ``count`` requests like ``request``, with consecutive uids and seeds (which wrap around at 64 bits)."""
    yield request
    for index in range(1, count):
        seed = (request.sampling.seed + index + _INT64_HALF) % (2 * _INT64_HALF) - _INT64_HALF
        sampling = replace(request.sampling, seed=seed)
        yield replace(request, uid=request.uid + index, sampling=sampling)


def _uids_of(message: TokenizeRequest | EncodeRequest | DecodeRequest) -> range:
    count = message.copies if isinstance(message, TokenizeRequest) else 1
    return range(message.uid, message.uid + count)


def load_prompt_builder(launch: Launch) -> PromptBuilder:
    """Load the model's tokenizer and chat template. Raises ``ModelError``."""
    files = read_tokenizer_files(
        launch.model.path, launch.model.tokenizer_path, chat_template=launch.config.chat_template
    )
    template = ChatTemplate(files.template, files.special_tokens)
    if not template.is_usable:
        log.warning("chat_disabled", reason=template.fault)
    elif launch.config.tool_call_parser not in ("auto", "none") and not template.shows_tools:
        log.warning(
            "tools_disabled",
            reason=f"the chat template does not show tools to the model; --tool-call-parser "
            f"{launch.config.tool_call_parser} has no effect, and requests with tools are refused",
        )
    max_model_len = launch.config.max_model_len
    assert max_model_len is not None, "max_model_len is resolved before any process starts"
    tokenizer = load_tokenizer(files.tokenizer)
    encoder = Encoder(
        tokenizer,
        vocab_size=launch.model.vocab_size,
        max_model_len=max_model_len,
        encode_text=choose_encoder(launch.config.tokenizer_backend, files.tokenizer, tokenizer),
    )
    return PromptBuilder(template=template, encoder=encoder, max_model_len=max_model_len)


def run(child: Child) -> None:
    """Run a tokenizer process."""
    os.nice(NICENESS)
    child.report_phase("config")
    inbox: Receiver[TokenizerMessage] = Receiver(child.endpoints.tokenizer(child.index), ToTokenizer)
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    grammars = GrammarQueue(GrammarCompileQueue(child.launch, poller))
    worker = TokenizerWorker(
        load_prompt_builder(child.launch),
        grammars,
        scheduler=Sender(child.endpoints.rank(0)),
        api=Sender(child.endpoints.api),
    )
    child.report_phase("ready")
    child.report_ready()
    while not child.should_stop:
        poller.poll(int(grammars.seconds_left(WAIT_SECONDS) * 1000) + 1)
        for message in inbox.drain(1):
            worker.serve(message)
        worker.forward_decided()
        child.beat()
    grammars.close()
