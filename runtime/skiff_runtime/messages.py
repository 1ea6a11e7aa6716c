"""The typed messages that cross process boundaries; nothing else does.

Encoded as MessagePack by msgspec. What flows once per step is columnar: arrays are
``bytes`` of little-endian numpy columns, so a batch of 256 rows costs two microseconds
to encode, not three hundred. ``Wire`` names the dtype of each column.

The way of a request: ``TokenizeRequest`` (api -> tokenizer) -> ``GenerateRequest``
(tokenizer -> rank 0) -> ``Inbox`` (rank 0 -> other ranks) -> ``TokenBatch`` (rank 0 ->
detokenizer) -> ``TextBatch`` (detokenizer -> api). ``AbortRequest`` takes the same way
as the request it ends, so that it never overtakes it.
"""

from enum import IntEnum, StrEnum
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from skiff_runtime.errors import RequestError

MAX_MESSAGE_BYTES: Final = 1 << 30
NO_TOKEN: Final = -1
"""In a row's ``tokens`` column: this row ends its request without a new token."""


class Wire:
    """Numpy dtypes of the columns."""

    UID: Final = np.dtype("<i8")
    TOKEN: Final = np.dtype("<i4")
    FINISH: Final = np.dtype("u1")
    LOGPROB: Final = np.dtype("<f4")


class Finish(IntEnum):
    """Why a request ended; ``RUNNING`` while it has not. ``TIMEOUT``: its deadline passed, what there is was told."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    TIMEOUT = 4


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    ``min_tokens``: before so many are out, neither an end of sequence nor a stop token is chosen, and no stop
    string is looked for.
    ``presence_penalty`` and ``frequency_penalty`` count output tokens, ``repetition_penalty`` also the
    prompt's. ``logit_bias``: pairs of token id and what is added to its logit. ``logprobs``: how many of the
    likeliest tokens are told of each output position beside the chosen one, None for nothing at all;
    ``prompt_logprobs`` likewise for the positions of the prompt but the first, which no cached prefix then serves.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON = "json"
    """Any JSON value; the source is empty."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    """GBNF, as llama.cpp and xgrammar read it."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of text with tagged parts, such as tool calls."""


class Grammar(Struct, frozen=True, array_like=True):
    """What the text of an answer must match."""

    kind: GrammarKind
    source: str = ""


class CompiledGrammar(Struct, frozen=True, array_like=True):
    """A grammar made ready for the model's vocabulary: xgrammar's serialized form. Equal keys mean equal data."""

    key: bytes
    data: bytes


class TextOptions(Struct, frozen=True, array_like=True):
    """What the detokenizer needs to know of a request. ``include_stop``: a stop string found is shown, too."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop: bool = False


class ChatPrompt(Struct, frozen=True):
    """A conversation to be rendered with the model's chat template.

    ``continue_final_message``: the answer goes on where the last message ends. ``tools``: OpenAI's
    tool objects. ``template_options``: further variables of the template, such as ``enable_thinking``.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}


class TokenizeRequest(Struct, frozen=True, tag="tokenize", array_like=True):
    """api -> tokenizer. ``sampling.max_tokens`` 0 means: what context and KV cache leave.

    ``copies`` requests come of it, with the uids ``uid``, ``uid + 1`` and on, and likewise seeds. A request of
    lower ``priority`` runs earlier.
    """

    uid: int
    prompt: str | list[int] | ChatPrompt
    sampling: SamplingParams
    text: TextOptions
    copies: int = 1
    priority: int = 0
    grammar: Grammar | None = None


class EncodeRequest(Struct, frozen=True, tag="encode", array_like=True):
    """api -> tokenizer: only tell the token ids of a prompt; answered by ``Encoded`` or ``RequestFailed``."""

    uid: int
    prompt: str | ChatPrompt
    add_special_tokens: bool = True


class DecodeRequest(Struct, frozen=True, tag="decode", array_like=True):
    """api -> tokenizer: only tell the text of token ids; answered by ``Decoded`` or ``RequestFailed``."""

    uid: int
    token_ids: list[int]


class Encoded(Struct, frozen=True, tag="encoded", array_like=True):
    """tokenizer -> api. ``token_ids``: bytes of ``Wire.TOKEN``; ``texts``: what each writes by itself."""

    uid: int
    token_ids: bytes
    texts: list[str]


class Decoded(Struct, frozen=True, tag="decoded", array_like=True):
    """tokenizer -> api."""

    uid: int
    text: str


class GenerateRequest(Struct, frozen=True, tag="generate", array_like=True):
    """tokenizer -> rank 0. ``token_ids``: bytes of ``Wire.TOKEN``, one or more; ``max_tokens`` 0 as above."""

    uid: int
    token_ids: bytes
    sampling: SamplingParams
    text: TextOptions
    priority: int = 0
    grammar: CompiledGrammar | None = None


class AbortRequest(Struct, frozen=True, tag="abort", array_like=True):
    """End a request: api -> its tokenizer -> rank 0, or detokenizer -> rank 0 (a stop string was found).

    ``finish`` is what the client is told, where anyone still listens.
    """

    uid: int
    finish: Finish = Finish.ABORT


class FlushCache(Struct, frozen=True, tag="flush", array_like=True):
    """api -> tokenizer -> rank 0: forget every cached prefix that no request holds; answered by ``Flushed``."""

    uid: int


class Flushed(Struct, frozen=True, array_like=True):
    """The answer to ``FlushCache``: how many pages were freed, and how many requests still hold some."""

    uid: int
    pages: int
    running: int


class Shutdown(Struct, frozen=True, tag="shutdown", array_like=True):
    """rank 0 -> other ranks: leave the loop."""


class Inbox(Struct, frozen=True, tag="inbox", array_like=True):
    """rank 0 -> other ranks: what arrived for this turn of the loop; ``digest`` of the last planned step."""

    items: list[GenerateRequest | AbortRequest | FlushCache | Shutdown]
    digest: int = 0


class RequestFailed(Struct, frozen=True, tag="failed", array_like=True):
    """A terminal reply: the request ended with an error. Fields as in ``errors.RequestError``."""

    uid: int
    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int = 0

    @staticmethod
    def of(uid: int, error: RequestError) -> "RequestFailed":
        """What ``error`` means for request ``uid``."""
        return RequestFailed(
            uid, error.status, error.kind, error.message, error.code, error.param, error.retry_after_seconds
        )


class StreamOpened(Struct, frozen=True, array_like=True):
    """First news of a request from the scheduler: it was admitted to run. ``min_tokens`` as in ``SamplingParams``."""

    uid: int
    prompt_tokens: int
    cached_tokens: int
    text: TextOptions
    min_tokens: int = 0


class StepStats(Struct, frozen=True, array_like=True):
    """The scheduler's gauges after a step, and what the step added to its counters.

    A step has ``prefill_rows`` chunks of prompts with ``prefill_tokens`` in all, and one row for each of
    ``decode_tokens``. ``lookup_tokens``: prompt tokens of requests that it lets run for the first time, of
    which ``hit_tokens`` were cached; ``queue_seconds``: how long each of these requests waited.
    """

    queued: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_size: int = 1
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    retracted: int = 0
    evicted_pages: int = 0
    prefill_rows: int = 0
    queued_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    queue_seconds: list[float] = []


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one row's new token: its own, and the likeliest tokens', likeliest first.

    They are the model's, before temperature, penalties, bias and grammar. ``top_ids``: bytes of ``Wire.TOKEN``;
    ``top_logprobs``: bytes of ``Wire.LOGPROB``, as many.
    """

    row: int
    logprob: float
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of T consecutive tokens of a prompt, the first of which stands at position ``start``.

    ``token_ids`` and ``logprobs`` have T entries, ``top_ids`` and ``top_logprobs`` T * ``top`` of them. Every
    token of the prompt is told once; that at position 0 has NaN for its log-probability, and its top ids are
    ``NO_TOKEN``.
    """

    uid: int
    start: int
    top: int
    token_ids: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class TokenBatch(Struct, frozen=True, tag="tokens", array_like=True):
    """rank 0 -> detokenizer, one per step. Columns have one row per request that got a token or ended."""

    opened: list[StreamOpened]
    uids: bytes
    tokens: bytes
    finishes: bytes
    failed: list[RequestFailed]
    stats: StepStats
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    flushed: list[Flushed] = []


class TokenText(Struct, frozen=True, array_like=True):
    """One token: id, the bytes it writes by itself, and its log-probability."""

    token: int
    data: bytes
    logprob: float


class TextLogprobs(Struct, frozen=True, array_like=True):
    """As ``TokenLogprobs``, with texts. ``row`` is that of the ``TextBatch``; -1 for a token of the prompt."""

    row: int
    chosen: TokenText
    top: list[TokenText]


class PromptTextLogprobs(Struct, frozen=True, array_like=True):
    """As ``PromptLogprobs``, with texts, one entry for each token; ``top`` of the one at position 0 is empty."""

    uid: int
    start: int
    tokens: list[TextLogprobs]


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one ended request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextBatch(Struct, frozen=True, tag="text", array_like=True):
    """detokenizer -> api. ``opened`` and rows as in ``TokenBatch``; ``texts`` may hold "" (bytes held back).

    ``usages`` has one entry for each row whose finish is not ``RUNNING``, in order of rows.
    """

    uids: bytes
    texts: list[str]
    tokens: bytes
    finishes: bytes
    usages: list[Usage]
    failed: list[RequestFailed]
    stats: StepStats
    logprobs: list[TextLogprobs] = []
    prompt_logprobs: list[PromptTextLogprobs] = []
    flushed: list[Flushed] = []
    opened: list[StreamOpened] = []


class Heartbeat(Struct, frozen=True, tag="beat", array_like=True):
    """child -> supervisor, about once a second, from the child's main loop."""

    process: str


class PhaseReport(Struct, frozen=True, tag="phase", array_like=True):
    """child -> supervisor -> api: a start phase was entered (``seconds`` spent in the one before it)."""

    process: str
    phase: str
    seconds: float
    progress: float = 0.0


class Ready(Struct, frozen=True, tag="ready", array_like=True):
    """child -> supervisor: this process serves. Ranks tell their KV capacity in tokens, fronts 0."""

    process: str
    kv_tokens: int = 0
    port: int = 0


class Beats(Struct, frozen=True, tag="beats", array_like=True):
    """supervisor -> api, about once a second: each process that has spoken, seconds since it did, whether it runs."""

    processes: list[str]
    ages: list[float]
    running: list[bool]


class ProcessFailed(Struct, frozen=True, tag="process_failed", array_like=True):
    """child -> supervisor: why this process ends; the last that is heard of it."""

    process: str
    message: str


class ServiceReady(Struct, frozen=True, tag="service_ready", array_like=True):
    """supervisor -> api: every process is ready."""

    kv_tokens: int


class Drain(Struct, frozen=True, tag="drain", array_like=True):
    """supervisor -> api: refuse new requests, finish the others, then exit."""

    timeout_seconds: float


class ServiceFailed(Struct, frozen=True, tag="service_failed", array_like=True):
    """supervisor -> api: end every request with this message, then exit."""

    message: str


ToTokenizer = TokenizeRequest | EncodeRequest | DecodeRequest | AbortRequest | FlushCache
ToScheduler = GenerateRequest | AbortRequest | FlushCache
ToDetokenizer = TokenBatch
ToApi = (
    TextBatch | RequestFailed | Encoded | Decoded | PhaseReport | Beats | ServiceReady | Drain | ServiceFailed
)
ToSupervisor = Heartbeat | PhaseReport | Ready | ProcessFailed

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T] | object) -> "msgspec.msgpack.Decoder[T]":
    """A strict decoder for one socket's union of messages."""
    return msgspec.msgpack.Decoder(kind)
