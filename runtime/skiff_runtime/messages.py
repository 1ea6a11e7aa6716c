"""The typed messages that cross process boundaries; nothing else does.

Encoded as MessagePack by msgspec. What flows once per step is columnar: arrays are
``bytes`` of little-endian numpy columns, so a batch of 256 rows costs two microseconds
to encode, not three hundred. ``Wire`` names the dtype of each column.

The way of a request: ``TokenizeRequest`` (api -> tokenizer) -> ``GenerateRequest``
(tokenizer -> rank 0) -> ``Inbox`` (rank 0 -> other ranks) -> ``TokenBatch`` (rank 0 ->
detokenizer) -> ``TextBatch`` (detokenizer -> api). ``AbortRequest`` takes the same way
as the request it ends, so that it never overtakes it.
"""

from enum import IntEnum
from typing import Final, TypeVar

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


class Finish(IntEnum):
    """Why a request ended; ``RUNNING`` while it has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 is off."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class TextOptions(Struct, frozen=True, array_like=True):
    """What the detokenizer needs to know of a request. ``wants_tokens``: the reply carries token ids too."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True


class ChatPrompt(Struct, frozen=True):
    """A conversation to be rendered with the model's chat template."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool = True


class TokenizeRequest(Struct, frozen=True, tag="tokenize", array_like=True):
    """api -> tokenizer. ``sampling.max_tokens`` 0 means: what context and KV cache leave."""

    uid: int
    prompt: str | list[int] | ChatPrompt
    sampling: SamplingParams
    text: TextOptions


class GenerateRequest(Struct, frozen=True, tag="generate", array_like=True):
    """tokenizer -> rank 0. ``token_ids``: bytes of ``Wire.TOKEN``, one or more; ``max_tokens`` 0 as above."""

    uid: int
    token_ids: bytes
    sampling: SamplingParams
    text: TextOptions


class AbortRequest(Struct, frozen=True, tag="abort", array_like=True):
    """End a request: api -> its tokenizer -> rank 0, or detokenizer -> rank 0 (a stop string was found).

    ``finish`` is what the client is told, where anyone still listens.
    """

    uid: int
    finish: Finish = Finish.ABORT


class Shutdown(Struct, frozen=True, tag="shutdown", array_like=True):
    """rank 0 -> other ranks: leave the loop."""


class Inbox(Struct, frozen=True, tag="inbox", array_like=True):
    """rank 0 -> other ranks: what arrived for this turn of the loop; ``digest`` of the last planned step."""

    items: list[GenerateRequest | AbortRequest | Shutdown]
    digest: int = 0


class RequestFailed(Struct, frozen=True, tag="failed", array_like=True):
    """A terminal reply: the request ended with an error. Fields as in ``errors.RequestError``."""

    uid: int
    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None

    @staticmethod
    def of(uid: int, error: RequestError) -> "RequestFailed":
        """What ``error`` means for request ``uid``."""
        return RequestFailed(uid, error.status, error.kind, error.message, error.code, error.param)


class StreamOpened(Struct, frozen=True, array_like=True):
    """First news of a request from the scheduler: it was admitted to run."""

    uid: int
    prompt_tokens: int
    cached_tokens: int
    text: TextOptions


class StepStats(Struct, frozen=True, array_like=True):
    """The scheduler's gauges after a step, and what the step added to its counters."""

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


class TokenBatch(Struct, frozen=True, tag="tokens", array_like=True):
    """rank 0 -> detokenizer, one per step. Columns have one row per request that got a token or ended."""

    opened: list[StreamOpened]
    uids: bytes
    tokens: bytes
    finishes: bytes
    failed: list[RequestFailed]
    stats: StepStats


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one ended request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextBatch(Struct, frozen=True, tag="text", array_like=True):
    """detokenizer -> api. Rows as in ``TokenBatch``; ``texts`` may hold "" (bytes held back).

    ``usages`` has one entry for each row whose finish is not ``RUNNING``, in order of rows.
    """

    uids: bytes
    texts: list[str]
    tokens: bytes
    finishes: bytes
    usages: list[Usage]
    failed: list[RequestFailed]
    stats: StepStats


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


class ServiceReady(Struct, frozen=True, tag="service_ready", array_like=True):
    """supervisor -> api: every process is ready."""

    kv_tokens: int


class Drain(Struct, frozen=True, tag="drain", array_like=True):
    """supervisor -> api: refuse new requests, finish the others, then exit."""

    timeout_seconds: float


class ServiceFailed(Struct, frozen=True, tag="service_failed", array_like=True):
    """supervisor -> api: end every request with this message, then exit."""

    message: str


ToTokenizer = TokenizeRequest | AbortRequest
ToScheduler = GenerateRequest | AbortRequest
ToDetokenizer = TokenBatch
ToApi = TextBatch | RequestFailed | PhaseReport | ServiceReady | Drain | ServiceFailed
ToSupervisor = Heartbeat | PhaseReport | Ready

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T] | object) -> "msgspec.msgpack.Decoder[T]":
    """A strict decoder for one socket's union of messages."""
    return msgspec.msgpack.Decoder(kind)
