"""From rank 0 to the detokenizer: what a step brought."""

from msgspec import Struct

from skiff_runtime.errors import RequestError
from skiff_runtime.messages.requests import TextOptions


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


class Flushed(Struct, frozen=True, array_like=True):
    """The answer to ``FlushCache``: how many pages were freed, and how many requests still hold some."""

    uid: int
    pages: int
    running: int


class StreamOpened(Struct, frozen=True, array_like=True):
    """First news of a request from the scheduler: it was admitted to run. ``min_tokens`` as in ``SamplingSpec``."""

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
    ``corrupted``: requests that failed because their logits contained NaN.
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
    preempted: int = 0
    evicted_pages: int = 0
    prefill_rows: int = 0
    queued_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    queue_seconds: list[float] = []
    corrupted: int = 0


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
