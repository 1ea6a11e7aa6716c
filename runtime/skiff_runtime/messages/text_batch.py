"""Messages from the tokenizers and the detokenizer to the api."""

from msgspec import Struct

from skiff_runtime.messages.cache_events import CacheEvents
from skiff_runtime.messages.lora import AdapterLoaded, AdapterRefused
from skiff_runtime.messages.pooling import PooledVector
from skiff_runtime.messages.token_batch import Flushed, RequestFailed, StepStats, StreamOpened


class Encoded(Struct, frozen=True, tag="encoded", array_like=True):
    """tokenizer -> api: the reply to ``EncodeRequest``. ``token_ids``: bytes of ``Wire.TOKEN``.

    ``texts``: each token's own, if the request asks for them.
    """

    uid: int
    token_ids: bytes
    texts: list[str]


class Decoded(Struct, frozen=True, tag="decoded", array_like=True):
    """tokenizer -> api: the reply to ``DecodeRequest``."""

    uid: int
    text: str


class TokenText(Struct, frozen=True, array_like=True, gc=False):
    """One token: its id, the bytes of its own text, and its log-probability."""

    token: int
    data: bytes
    logprob: float


class TextLogprobs(Struct, frozen=True, array_like=True):
    """``TokenLogprobs`` with texts. ``row``: that of the ``TextBatch``; -1 for a token of the prompt, which has a ``rank``."""

    row: int
    chosen: TokenText
    top: list[TokenText]
    rank: int = 0


class PromptTextLogprobs(Struct, frozen=True, array_like=True):
    """``PromptLogprobs`` with texts, one entry for each token. At position 0, ``top`` is empty."""

    uid: int
    start: int
    tokens: list[TextLogprobs]


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of a request that has ended, and the stop string that ended it, if one did."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_string: str | None = None


class TextBatch(Struct, frozen=True, tag="text", array_like=True):
    """detokenizer -> api: a ``TokenBatch`` with texts; "" where the bytes are still held back.

    ``usages`` has one entry for each row whose finish reason is not ``RUNNING``, in the order of rows.
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
    pooled: list[PooledVector] = []
    cache_events: CacheEvents | None = None
    adapters: list[AdapterLoaded | AdapterRefused] = []
