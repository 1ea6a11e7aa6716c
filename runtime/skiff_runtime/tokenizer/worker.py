"""The tokenizer process: requests of the API in, requests of the scheduler out, in order."""

from typing import Final

from skiff_runtime import log
from skiff_runtime.errors import RequestError
from skiff_runtime.launch import Launch
from skiff_runtime.messages import AbortRequest, RequestFailed, TokenizeRequest, ToTokenizer
from skiff_runtime.process import Child
from skiff_runtime.tokenizer.encoder import Encoder, load_tokenizer
from skiff_runtime.tokenizer.model_files import read_tokenizer_files
from skiff_runtime.tokenizer.prompt import PromptBuilder
from skiff_runtime.tokenizer.template import ChatTemplate
from skiff_runtime.transport import Receiver, Sender

WAIT_SECONDS: Final = 0.5


class TokenizerWorker:
    """Serves one tokenizer endpoint."""

    def __init__(self, builder: PromptBuilder, *, scheduler: Sender, api: Sender) -> None:
        self._builder = builder
        self._scheduler = scheduler
        self._api = api

    def serve(self, message: TokenizeRequest | AbortRequest) -> None:
        """Pass one message on; a prompt that cannot be served is answered, and harms nobody else."""
        if isinstance(message, AbortRequest):
            self._scheduler.send(message)
            return
        try:
            request = self._builder.build(message)
        except RequestError as error:
            self._api.send(RequestFailed.of(message.uid, error))
            return
        self._scheduler.send(request)


def load_builder(launch: Launch) -> PromptBuilder:
    """Read the model's tokenizer and chat template. Raises ``ModelError``."""
    files = read_tokenizer_files(launch.model.path)
    template = ChatTemplate(files.template, files.special_tokens)
    if not template.usable:
        log.warning("chat_unavailable", reason=template.fault)
    max_model_len = launch.config.max_model_len
    assert max_model_len is not None, "the configuration is resolved before processes start"
    encoder = Encoder(
        load_tokenizer(files.tokenizer), vocab_size=launch.model.vocab_size, max_model_len=max_model_len
    )
    return PromptBuilder(template=template, encoder=encoder, max_model_len=max_model_len)


def run(child: Child) -> None:
    """Main function of a tokenizer process."""
    child.phase("config")
    inbox: Receiver[TokenizeRequest | AbortRequest] = Receiver(
        child.endpoints.tokenizer(child.index), ToTokenizer
    )
    worker = TokenizerWorker(
        load_builder(child.launch),
        scheduler=Sender(child.endpoints.rank(0)),
        api=Sender(child.endpoints.api),
    )
    child.phase("ready")
    child.ready()
    while not child.stopping:
        message = inbox.receive(WAIT_SECONDS)
        if message is not None:
            worker.serve(message)
        child.beat()
