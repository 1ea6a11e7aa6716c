"""Messages from rank 0 to the detokenizer: the results of a step."""

from msgspec import Struct

from skiff_runtime.errors import RequestError
from skiff_runtime.messages.cache_events import CacheEvents
from skiff_runtime.messages.lora import AdapterLoaded, AdapterRefused
from skiff_runtime.messages.pooling import PooledVector
from skiff_runtime.messages.requests import TextOptions


class RequestFailed(Struct, frozen=True, tag="failed", array_like=True):
    """A terminal reply: the request ended with an error. The fields are those of ``errors.RequestError``."""

    uid: int
    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int = 0

    @staticmethod
    def of(uid: int, error: RequestError) -> "RequestFailed":
        """Make the failure of request ``uid`` by ``error``."""
        return RequestFailed(
            uid, error.status, error.kind, error.message, error.code, error.param, error.retry_after_seconds
        )


class Flushed(Struct, frozen=True, array_like=True):
    """The reply to ``FlushCache``: pages that were freed, and running requests, whose pages were not."""

    uid: int
    pages: int
    running: int


class StreamOpened(Struct, frozen=True, array_like=True):
    """The scheduler's first message about a request, once it runs. ``min_tokens`` as in ``SamplingSpec``.

    ``prompt_token_ids``: bytes of ``Wire.TOKEN``, b"" unless ``text.return_token_ids``. ``started_at``: when its first step
    was launched, by ``time.perf_counter``, which has the same zero in all processes of a machine; 0 if it is not known.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    text: TextOptions
    min_tokens: int = 0
    prompt_token_ids: bytes = b""
    started_at: float = 0.0


class StepStats(Struct, frozen=True, array_like=True):
    """The scheduler's gauges after a step, and the step's increments of its counters.

    A step has ``prefill_rows`` prefill chunks with ``prefill_tokens`` in total, and one row for each of
    ``decode_tokens``. ``lookup_tokens``: prompt tokens of the requests that it runs for the first time, of
    which ``hit_tokens`` were cached; ``queue_seconds``: the time that each of these requests waited.
    ``preempted``: requests preempted for this step. ``corrupted``: requests that failed because their logits
    contained NaN. ``graphs_pending``: CUDA graphs that are not captured yet. ``queued_uncached_tokens``: those of
    ``queued_tokens`` that were not cached; ``prefill_tokens_left``: prompt tokens of running requests that no step has
    computed yet, both for routers. ``received``: uids of the requests that the scheduler has received since the statistics
    before.

    ``running_adapters``, ``waiting_adapters`` and ``resident_adapters``: ids of the LoRA adapters of running requests, of
    waiting requests, and of those in a LoRA slot. ``adapter_reads``, ``adapter_loads`` and ``adapter_evictions``: adapters that
    were read into host memory, copied into a slot, and replaced in one.
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
    graphs_pending: int = 0
    queued_uncached_tokens: int = 0
    prefill_tokens_left: int = 0
    running_adapters: list[int] = []
    waiting_adapters: list[int] = []
    resident_adapters: list[int] = []
    adapter_reads: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    received: list[int] = []


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one row's new token: the token's own, and the top tokens' in descending order.

    They are the model's, before temperature, penalties, bias and grammar. ``top_ids``: bytes of ``Wire.TOKEN``;
    ``top_logprobs``: bytes of ``Wire.LOGPROB``, as many.
    """

    row: int
    logprob: float
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of T consecutive tokens of a prompt, from position ``start`` on.

    ``token_ids`` and ``logprobs`` have T entries, ``top_ids`` and ``top_logprobs`` have T * ``top``. Every token
    of the prompt is sent once. The one at position 0 has NaN as its log-probability and ``NO_TOKEN`` as top ids. ``ranks``
    has T entries of ``Wire.TOKEN``: the place of each token among all, 1 for the most likely one, and 0 at position 0.
    """

    uid: int
    start: int
    top: int
    token_ids: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    ranks: bytes = b""


class TokenBatch(Struct, frozen=True, tag="tokens", array_like=True):
    """rank 0 -> detokenizer, once a step. The columns have one row for each request that got a token or ended."""

    opened: list[StreamOpened]
    uids: bytes
    tokens: bytes
    finishes: bytes
    failed: list[RequestFailed]
    stats: StepStats
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    flushed: list[Flushed] = []
    pooled: list[PooledVector] = []
    cache_events: CacheEvents | None = None
    adapters: list[AdapterLoaded | AdapterRefused] = []
